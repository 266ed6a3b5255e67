"""The other side of `compare_grpo.py`: TRL's GRPO trainer on the same files. Runs in its own environment."""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_inputs import PROMPTS_FILE, add_device_options, count_prompts, share_of_vowels
from run_trl import measure


def build_trainer(options: argparse.Namespace, output: str, reward: Callable[..., list[float]]) -> Any:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    together = count_prompts(options.inputs) * options.samples
    config = GRPOConfig(
        output_dir=output,
        per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=together // options.micro_batch,
        generation_batch_size=together,
        num_generations=options.samples,
        max_completion_length=options.new_tokens,
        max_steps=options.iterations + 1,
        temperature=1.0,
        beta=0.0,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        bf16=options.precision == "bf16",
        gradient_checkpointing=options.gradient_checkpointing,
        use_cpu=options.device == "cpu",
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )
    lines = (options.inputs / PROMPTS_FILE).read_text().splitlines()
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([json.loads(line) for line in lines]),
        processing_class=AutoTokenizer.from_pretrained(options.model, padding_side="left"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--inputs", type=Path, required=True)
    parser.add_argument("--samples", type=int, required=True, help="answers per prompt")
    parser.add_argument("--new-tokens", type=int, required=True)
    parser.add_argument("--iterations", type=int, required=True, help="measured iterations, after one of warm-up")
    parser.add_argument("--micro-batch", type=int, required=True, help="answers per pass of the update")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    add_device_options(parser)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    tokens: list[int] = []

    def reward(completions: list[Any], completion_ids: list[list[int]], **rest: Any) -> list[float]:
        tokens.append(sum(map(len, completion_ids)))
        return [share_of_vowels(messages[0]["content"]) for messages in completions]

    with tempfile.TemporaryDirectory() as folder:
        seconds, peak = measure(build_trainer(options, folder, reward), options.device)
    print(json.dumps({"seconds": seconds[1:], "tokens": tokens[1:], "peak_bytes": peak}))


if __name__ == "__main__":
    main()
