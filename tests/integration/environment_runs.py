"""One process of the runs that `test_environments.py` compares."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from algorithm_runs import one_ray
from running import PATIENCE_SECONDS, without_report

from rlhf_core import train

GAMES = Path(__file__).with_name("digit_games.py")

RUNS: dict[str, dict[str, Any]] = {
    "ppo": {"algorithm": {"name": "ppo", "kl_coef": 0.05}},
    "grpo": {"algorithm": {"name": "grpo"}},
    "ppo-branches": {"algorithm": {"name": "ppo", "kl_coef": 0.05}, "environment": {"name": f"{GAMES}:Branches"}},
    "grpo-branches": {"algorithm": {"name": "grpo"}, "environment": {"name": f"{GAMES}:Branches"}},
    "several": {
        "algorithm": {"name": "ppo", "kl_coef": 0.05},
        "environment": {
            "name": "several",
            "of": {
                "branches": {"name": f"{GAMES}:Branches", "share": 2},
                "digits": {"name": f"{GAMES}:CountDigits", "max_turns": 3, "rewards": ["length:0.5"], "concurrency": 2},
            },
        },
    },
    "turn-credit": {
        "algorithm": {"name": "grpo", "advantage": {"name": "gigpo", "state": "history"}, "turn_gamma": 0.9},
        "environment": {"name": f"{GAMES}:Branches"},
    },
    "lora": {"algorithm": {"name": "grpo"}, "model": {"path": "builtin:tiny-digits", "lora": {"r": 4}}},
}

ISOLATED: dict[str, Any] = {"environment": {"name": f"{GAMES}:Branches", "isolate": True}}
"""For the run `grpo-branches`."""

DEPLOYMENTS: dict[str, dict[str, Any]] = {
    "single": {"strategy": {"name": "single"}},
    "ddp": {"strategy": {"name": "ddp"}},
    "ray": {"transport": {"name": "ray", "max_staleness": 0, "num_makers": 2}},
}


def run_file(name: str, deployment: str = "single", **changes: Any) -> dict[str, Any]:
    """Sizes that do not divide by two, and episodes of different lengths."""
    return {
        "model": {"path": "builtin:tiny-digits"},
        "environment": {"name": f"{GAMES}:CountDigits", "max_turns": 5},
        # A large eps: Adam would make whole steps out of gradients that are but rounding.
        "optimizer": {"lr": 1e-3, "eps": 1e-4},
        "engine": {"name": "hf", "max_new_tokens": 4},
        "train": {
            "episodes": 2,
            "prompts_per_episode": 5,
            "samples_per_prompt": 3,
            "train_batch_size": 7,
            "micro_batch_tokens": 64,
        },
        "checkpoint": {"every_episodes": None},
        "logging": {"tensorboard": False},
        **RUNS[name],
        **DEPLOYMENTS[deployment],
        **changes,
    }


def make_runs(out: Path, deployment: str, names: Sequence[str] = tuple(RUNS)) -> None:
    """In a process of its own: these runs, with one thread and without plots."""
    torch.set_num_threads(1)
    without_report()
    if deployment == "ddp":
        # One group for all runs: a strategy uses the one it finds.
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE_SECONDS))
    with one_ray() if deployment == "ray" else nullcontext():
        for name in names:
            train(run_file(name, deployment), output=out / f"{name}-{deployment}")
        if deployment != "ddp" and "grpo-branches" in names:
            train(run_file("grpo-branches", deployment, **ISOLATED), output=out / f"isolated-{deployment}")
        if deployment == "ray":
            (out / "dies").touch()
            environment = {"name": f"{GAMES}:CountDigits", "max_turns": 5, "dies_at": str(out / "dies")}
            train(run_file("ppo", "ray", environment=environment), output=out / "killed-ray")
