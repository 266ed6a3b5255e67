"""One rank of the runs that `test_strategies_agree.py` compares: every strategy in turn, in one pair of processes."""

from __future__ import annotations

import os
import shutil
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from rlhf_core import train

REWARD = Path(__file__).with_name("digit_reward.py")


def run_file(strategy: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A small PPO run with everything in it that ranks must agree on: reference, critic, ragged micro-batches."""
    return {
        "model": {"path": "builtin:tiny-digits", **changes.get("model", {})},
        "prompts": {"name": "sort-digits", "size": 500, "num_digits": 6, "max_prompt_tokens": 32},
        "algorithm": {"name": "ppo", "kl_coef": 0.05, "entropy_coef": 0.01},
        "optimizer": {"lr": 3e-4, "critic_lr": 3e-4, "warmup_episodes": 1},
        "strategy": strategy,
        "rewards": [{"name": f"{REWARD}:sorted_fraction"}],
        "engine": {"name": "hf", "max_new_tokens": 8},
        # 33 prompts on two ranks, and a token budget that gives the ranks different numbers of micro-batches.
        "train": {
            "episodes": 3,
            "prompts_per_episode": 33,
            "samples_per_prompt": 2,
            "train_batch_size": 22,
            "micro_batch_tokens": 64,
            "seed": 3,
        },
        "checkpoint": {"every_episodes": 1, "keep": 5},
        "logging": {"tensorboard": False},
    }


def train_and_resume(out: Path, name: str, run: dict[str, Any], rank: int) -> None:
    """The run, and the same run resumed from the checkpoint behind its first episode in a copy of its folder."""
    train(run, output=out / name)
    first = sorted((out / name / "checkpoints").glob("step-*"), key=lambda p: int(p.name[5:]))[0]
    copy = out / f"{name}-resumed"
    if rank == 0:
        shutil.copytree(out / name, copy)
        for later in (copy / "checkpoints").glob("step-*"):
            if later.name != first.name:
                shutil.rmtree(later)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    train(run, output=copy, resume=str(copy / "checkpoints" / first.name))


def main(out: Path, rank: int, names: list[str]) -> None:
    if names != ["single"]:
        # One group for all runs: a strategy uses the one it finds.
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=120))
    for name in names:
        train_and_resume(out, name, run_file({"name": name}), rank)
        if name != "gemini":
            train(run_file({"name": name}, model={"lora": {"r": 4}}), output=out / f"{name}-lora")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3].split(","))
    # As `rlhf_core.launched` ends: an ordinary exit now and then aborts in gloo's threads.
    os._exit(0)
