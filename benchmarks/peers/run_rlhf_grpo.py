"""One side of `compare_grpo.py`: GRPO iterations of `rlhf_core.train`, as in the command."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpo_inputs
from run_rlhf import measure


def run_file(options: argparse.Namespace) -> Mapping[str, Any]:
    """Run file with one AdamW step of all float32 weights per iteration, without KL penalty or gradient clipping."""
    prompts = grpo_inputs.count_prompts(options.inputs)
    return {
        "model": {"path": str(options.model), "dtype": "float32", "device": options.device},
        "prompts": {"name": "jsonl", "path": str(options.inputs / grpo_inputs.PROMPTS_FILE)},
        "algorithm": {"name": "grpo", "kl_coef": 0.0},
        "optimizer": {"lr": 1e-6, "max_grad_norm": None},
        "strategy": {"name": "single", "precision": options.precision},
        "rewards": [{"name": f"{grpo_inputs.__file__}:vowels"}],
        "engine": {"name": "hf", "max_new_tokens": options.new_tokens, "temperature": 1.0},
        "train": {
            "episodes": options.iterations + 2,
            "prompts_per_episode": prompts,
            "samples_per_prompt": options.samples,
            "train_batch_size": prompts * options.samples,
            "micro_batch_tokens": options.micro_batch_tokens,
        },
        "checkpoint": {"every_episodes": None},
        "logging": {"tensorboard": False},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--inputs", type=Path, required=True)
    parser.add_argument("--samples", type=int, required=True, help="answers per prompt")
    parser.add_argument("--new-tokens", type=int, required=True)
    parser.add_argument("--iterations", type=int, required=True, help="measured iterations, after one of warm-up")
    parser.add_argument("--micro-batch-tokens", type=int)
    grpo_inputs.add_device_options(parser)
    options = parser.parse_args()
    print(json.dumps(measure(run_file(options), options.iterations, options.device)))


if __name__ == "__main__":
    main()
