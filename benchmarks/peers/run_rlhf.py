"""One side of a comparison: PPO iterations of `rlhf_core.train`, as in the command."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inputs import peak_bytes


class Watch:
    """Seconds, response tokens and memory at the end of each episode."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.seconds: list[float] = []
        self.tokens: list[int] = []
        self.peaks: list[int] = []
        self._started = 0.0

    def rlhf_episode_start(self, episode: int) -> None:
        self._started = time.perf_counter()

    def rlhf_make_experience_end(self, groups: Any) -> None:
        self.tokens.append(sum(len(rollout.sampled_ids) for group in groups for rollout in group.rollouts))

    def rlhf_episode_end(self, episode: int, metrics: Any) -> None:
        self.seconds.append(time.perf_counter() - self._started)
        self.peaks.append(peak_bytes(self._device))


def measure(run: Mapping[str, Any], iterations: int, device: str, watch: Watch | None = None) -> dict[str, Any]:
    """Train and report on `iterations` iterations after one of warm-up.

    The run has one more iteration, which also writes the final checkpoint and is not measured.
    """
    from rlhf_core import train

    watch = watch or Watch(device)
    with tempfile.TemporaryDirectory() as folder:
        train(run, output=Path(folder) / "run", hooks=[watch])
    measured = slice(1, 1 + iterations)
    return {
        "seconds": watch.seconds[measured],
        "tokens": watch.tokens[measured],
        "peak_bytes": watch.peaks[iterations],
    }


def run_file(inputs: Path, options: argparse.Namespace) -> Mapping[str, Any]:
    """Run file of PPO with TRL's defaults, a KL penalty, a critic, and a reward model."""
    return {
        "model": {"path": str(inputs / "model"), "device": options.device},
        "prompts": {"name": "jsonl", "path": str(inputs / "prompts.jsonl")},
        "algorithm": {"name": "ppo", "kl_coef": 0.05, "vf_coef": 0.1, "lam": 0.95, "gamma": 1.0},
        "optimizer": {"lr": 1e-6, "max_grad_norm": None},
        "strategy": {"name": "single", "precision": options.precision},
        "rewards": [{"name": "model", "path": str(inputs / "reward")}],
        "engine": {"name": "hf", "max_new_tokens": options.new_tokens, "temperature": 1.0},
        "train": {
            "episodes": options.iterations + 2,
            "prompts_per_episode": options.prompts,
            "samples_per_prompt": options.samples,
            "train_batch_size": options.prompts * options.samples,
            "epochs_per_episode": options.epochs,
            "micro_batch_tokens": options.micro_batch_tokens,
        },
        "checkpoint": {"every_episodes": None},
        "logging": {"tensorboard": False},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=Path, required=True)
    parser.add_argument("--prompts", type=int, required=True)
    parser.add_argument("--samples", type=int, default=1, help="answers per prompt")
    parser.add_argument("--new-tokens", type=int, required=True)
    parser.add_argument("--iterations", type=int, required=True, help="measured iterations, after one of warm-up")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--micro-batch-tokens", type=int)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    print(json.dumps(measure(run_file(options.inputs, options), options.iterations, options.device)))


if __name__ == "__main__":
    main()
