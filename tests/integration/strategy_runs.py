"""One rank of the runs that `test_strategies_agree.py` compares: every strategy in turn, in one pair of processes."""

from __future__ import annotations

import shutil
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from running import PATIENCE_SECONDS, without_report

from rlhf_core import train
from rlhf_core.hookspecs import Action, Moment

REWARD = Path(__file__).with_name("digit_reward.py")
ROLLED_BACK = ("ddp", "gemini")


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
        # 17 prompts on two ranks, and a token budget that gives the ranks different numbers of micro-batches.
        "train": {
            "episodes": 2,
            "prompts_per_episode": 17,
            "samples_per_prompt": 2,
            "train_batch_size": 12,
            "micro_batch_tokens": 64,
            "seed": 3,
        },
        "eval": {"every_episodes": None, "num_prompts": 16},
        "checkpoint": {"every_episodes": 1, "keep": 5},
        "logging": {"tensorboard": False},
    }


class RollBackOnce:
    """A guard that sees something at the fifth update, once."""

    seen = False
    may_roll_back = True

    def rlhf_decide(self, moment: Moment) -> Action | None:
        if moment.step != 5 or self.seen:
            return None
        self.seen = True
        return Action(kind="rollback", by="mine", reason="asked for by the test", lr_factor=1.0)


def train_and_roll_back(out: Path, name: str, rank: int) -> None:
    """The run, which goes back in its second episode, at the same learning rate, to the end of its first."""
    train(run_file({"name": name}), output=out / f"{name}-rolled", hooks=[RollBackOnce()] if rank == 0 else [])


def resume_a_copy(out: Path, name: str, run: dict[str, Any], rank: int) -> None:
    """The run that is there, resumed from the checkpoint behind its first episode in a copy of its folder."""
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


def train_one(run: dict[str, Any], folder: Path, resume: str | None) -> None:
    """In a process of its own: one rank of one run."""
    torch.set_num_threads(1)
    without_report()
    train(run, output=folder, resume=resume)


def make_runs(out: Path, rank: int, names: list[str], again: bool) -> None:
    """In a process of its own: every run of these strategies, with one thread and without plots.

    again: these are there, and now resumed and rolled back.
    """
    torch.set_num_threads(1)
    without_report()
    if names != ["single"]:
        # One group for all runs: a strategy uses the one it finds.
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE_SECONDS))
    warnings.filterwarnings("error", message="FSDP2-wrapped module")
    for name in names:
        if not again:
            train(run_file({"name": name}), output=out / name)
            continue
        resume_a_copy(out, name, run_file({"name": name}), rank)
        if name in ROLLED_BACK:
            train_and_roll_back(out, name, rank)
    if again and "gemini" in names:
        continued = run_file({"name": "ddp"}, model={"path": str(out / "gemini" / "model")})
        train(continued, output=out / "gemini-then-ddp")
