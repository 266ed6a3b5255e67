"""The other side of a comparison: TRL's PPO trainer on the same files. Runs in its own environment."""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from inputs import peak_bytes


def count_generated(model: Any, pad_token_id: int, tokens: list[int]) -> None:
    """Make `model.generate` record the number of generated tokens."""
    generate = model.generate

    def counted(input_ids: Any, **rest: Any) -> Any:
        output = generate(input_ids=input_ids, **rest)
        tokens.append(int((output.sequences[:, input_ids.shape[1] :] != pad_token_id).sum()))
        return output

    model.generate = counted


def build_trainer(options: argparse.Namespace, output: str, tokens: list[int]) -> Any:
    """Build TRL's trainer. `tokens` receives the number of generated tokens of each iteration."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    model, reward = str(options.inputs / "model"), str(options.inputs / "reward")
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    if tokenizer.pad_token_id == tokenizer.eos_token_id:  # the trainer drops all pad tokens of a text
        tokenizer.pad_token = tokenizer.unk_token
    together = options.prompts * options.samples
    lines = [json.loads(line) for line in (options.inputs / "prompts.jsonl").read_text().splitlines()]
    prompts = [{"input_ids": tokenizer(line["prompt"])["input_ids"]} for line in lines]
    prompts = [prompt for prompt in prompts for _ in range(options.samples)]
    dtype = torch.bfloat16 if options.precision == "bf16-weights" else torch.float32
    config = PPOConfig(
        output_dir=output,
        per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=together // options.micro_batch,
        local_rollout_forward_batch_size=together,
        num_mini_batches=1,
        num_ppo_epochs=options.epochs,
        total_episodes=together * (options.iterations + 1),
        response_length=options.new_tokens,
        stop_token=None if options.fixed else "eos",
        temperature=1.0,
        kl_coef=0.05,
        vf_coef=0.1,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        bf16=options.precision == "bf16",
        gradient_checkpointing=False,
        use_cpu=options.device == "cpu",
        num_sample_generations=0,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    critic = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=dtype)
    if options.gradient_checkpointing:  # the trainer ignores the option of its config
        policy.gradient_checkpointing_enable()
        critic.gradient_checkpointing_enable()
    count_generated(policy, tokenizer.pad_token_id, tokens)
    trainer = PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=policy,
        ref_model=AutoModelForCausalLM.from_pretrained(model, dtype=dtype),
        reward_model=AutoModelForSequenceClassification.from_pretrained(reward, num_labels=1, dtype=dtype),
        value_model=critic,
        train_dataset=Dataset.from_list(prompts),
        # TRL always builds a loader for it, but uses it only to show samples, which is off.
        eval_dataset=Dataset.from_list(prompts[:1]),
    )
    # Otherwise each pass over the last batch of prompts, here the only one, makes a separate optimizer step.
    trainer.accelerator.gradient_state.plugin_kwargs["sync_with_dataloader"] = False
    return trainer


def measure(trainer: Any, device: str) -> tuple[list[float], int]:
    """Train. Return seconds of each iteration, and the peak memory until the end of the last."""
    from transformers import TrainerCallback

    marks: list[float] = []
    peaks: list[int] = []

    class Marks(TrainerCallback):
        def on_train_begin(self, *args: Any, **rest: Any) -> None:
            marks.append(time.perf_counter())

        def on_step_end(self, *args: Any, **rest: Any) -> None:
            marks.append(time.perf_counter())
            peaks.append(peak_bytes(device))

    trainer.add_callback(Marks())
    trainer.train()
    return [later - earlier for earlier, later in itertools.pairwise(marks)], peaks[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=Path, required=True)
    parser.add_argument("--prompts", type=int, required=True)
    parser.add_argument("--samples", type=int, default=1, help="answers per prompt, as repeated prompts")
    parser.add_argument("--new-tokens", type=int, required=True)
    parser.add_argument("--iterations", type=int, required=True, help="measured iterations, after one of warm-up")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--precision", choices=["fp32", "bf16", "bf16-weights"], default="fp32")
    parser.add_argument("--micro-batch", type=int, required=True, help="answers per pass of the update")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--fixed", action="store_true", help="answers do not stop early")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    tokens: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        seconds, peak = measure(build_trainer(options, folder, tokens), options.device)
    print(json.dumps({"seconds": seconds[1:], "tokens": tokens[1:], "peak_bytes": peak}))


if __name__ == "__main__":
    main()
