"""One process of the runs that `test_algorithms_agree.py` compares: every algorithm in turn."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from quick_ray import quick_workers
from running import PATIENCE_SECONDS, without_report

from rlhf_core import train
from rlhf_core.plugins.discovery import discover
from rlhf_objective.named_functions import KL_ESTIMATORS
from rlhf_testing.models import builtin_model

ALGORITHMS: dict[str, dict[str, Any]] = {
    "ppo": {"name": "ppo"},
    "grpo": {"name": "grpo", "importance_cap": 2.0, "dynamic_sampling": True},
    "grpo-sequence": {"name": "grpo", "policy_loss": "gspo", "aggregation": "sequence-mean-token-mean"},
    "rloo": {"name": "rloo", "policy_loss": "cispo", "aggregation": "sequence-mean-token-sum-norm"},
    "reinforce": {"name": "reinforce++", "entropy_coef": 0.01},
    "rejection-sampling": {"name": "rejection-sampling", "imitation": {"best": 1}},
    "online-dpo": {"name": "online-dpo"},
    "grpo-sources": {"name": "grpo", "imitation": {"coef": 0.1, "best": 2}, "preference": {"coef": 0.2}},
    "distill": {"name": "distill", "top_k": 6, "divergence": "jsd"},
    "distill-sampled": {"name": "distill", "reward_coef": 0.5},
    "distill-self": {
        "name": "distill",
        "top_k": 6,
        "teacher": {"policy": "current", "context": "{completion},{prompt}"},
    },
    "sft": {"name": "sft", "packing": True, "max_tokens": 32},
    "dpo": {"name": "dpo"},
    "kto": {"name": "kto"},
    "orpo": {"name": "orpo"},
    "simpo": {"name": "simpo"},
    "reward-model": {"name": "reward-model", "centring_coef": 0.01},
    "process-reward-model": {"name": "process-reward-model", "step_separator": ","},
}
ROLLOUTS = ("ppo", "grpo", "rloo", "reinforce", "rejection", "online", "distill", "with")

WEIGHTS: list[dict[str, Any]] = [
    {"importance_cap": 1.1},
    {"importance_cap": 1.5, "importance_level": "sequence"},
    {"importance_token_range": [0.8, 1.2]},
    {"importance_sequence_range": [0.9, 1.1]},
    {"importance_outlier_range": [0.7, 1.4]},
    {"divergence_bound": 0.02, "divergence_level": "token", "divergence_estimator": "k2"},
    {"divergence_bound": 0.01},
    {"divergence_bound": 0.05, "divergence_level": "sequence-sum"},
    {"divergence_bound": 0.03, "divergence_level": "sequence-max", "divergence_estimator": "k2"},
    {"mask_truncated": True, "overlong_buffer_tokens": 3, "entropy_target": 9.0, "entropy_coef": 0.01},
]
"""What is done about off-policy, long and truncated answers."""


def with_every_function() -> dict[str, dict[str, Any]]:
    """So many algorithms that each estimator, loss, KL and weight is in one of them, with another of each kind."""
    losses, advantages = (
        sorted(ref.name for ref in discover(kind).values()) for kind in ("policy_losses", "advantages")
    )
    found: dict[str, dict[str, Any]] = {}
    for number in range(max(len(each) for each in (losses, advantages, KL_ESTIMATORS, WEIGHTS))):
        own = {
            "policy_loss": losses[number % len(losses)],
            "advantage": advantages[number % len(advantages)],
            "kl_estimator": KL_ESTIMATORS[number % len(KL_ESTIMATORS)],
        }
        extra = {"critic_lam": 0.5} if number % 2 else {}
        name = "-".join(["with", *own.values(), str(number)])
        found[name] = {
            "name": "ppo" if number % 2 else "grpo",
            **own,
            **WEIGHTS[number % len(WEIGHTS)],
            **extra,
            "kl_coef": 0.05,
            # A KL in the reward makes it negative, which max-likelihood refuses.
            "kl_in": "reward" if number % 3 == 0 and own["advantage"] != "max-likelihood" else "loss",
        }
    return found


ALGORITHMS |= with_every_function()


DEPLOYMENTS: dict[str, dict[str, Any]] = {
    "single": {"strategy": {"name": "single"}},
    "ddp": {"strategy": {"name": "ddp"}},
    "ray": {"transport": {"name": "ray", "max_staleness": 0}},
}


def run_file(name: str, deployment: str, data: Path) -> dict[str, Any]:
    """Sizes that do not divide by two, and a token budget that gives the ranks different numbers of micro-batches."""
    run: dict[str, Any] = {
        "model": {"path": "builtin:tiny-digits", "device": "cpu"},
        "prompts": {"name": "jsonl", "path": str(data)},
        "algorithm": ALGORITHMS[name],
        # A large eps: Adam would make whole steps out of gradients that are but rounding.
        "optimizer": {"lr": 3e-4, "eps": 1e-4},
        **DEPLOYMENTS[deployment],
        "train": {"episodes": 2, "prompts_per_episode": 11, "train_batch_size": 7, "micro_batch_tokens": 64},
        "checkpoint": {"every_episodes": None},
        "logging": {"tensorboard": False},
    }
    if name == "grpo-sources":
        run["algorithm"] = {**run["algorithm"], "records": {"path": str(data), "coef": 0.3}}
    if name.startswith(ROLLOUTS):
        run["engine"] = {"name": "hf", "max_new_tokens": 6}
        run["rewards"] = [{"name": "length", "target_tokens": 2}]
        run["train"] |= {"samples_per_prompt": 3, "train_batch_size": 14}
        if name.startswith("distill"):
            run["algorithm"] = {"teacher": {"path": str(data.parent / "teacher")}, **run["algorithm"]}
    else:
        run["eval"] = {"every_episodes": 2, "num_prompts": 5}
    if name == "sft":  # its answers to held-out prompts are judged, too
        run["engine"] = {"name": "hf", "max_new_tokens": 6}
        run["rewards"] = [{"name": "length", "target_tokens": 2}]
    return run


def write_data(path: Path) -> None:
    """Digits, their sorted and their reversed form; beside them a teacher."""
    draw = random.Random(1)
    lines = []
    for _ in range(60):
        digits = [draw.choice("0123456789") for _ in range(draw.randint(2, 6))]
        good, bad = "".join(sorted(digits)), "".join(sorted(digits, reverse=True)) + "1"
        prompt = "".join(digits) + ">"
        steps = {"steps": list(bad), "labels": [good.startswith(bad[: end + 1]) for end in range(len(bad))]}
        lines.append(json.dumps({"prompt": prompt, "completion": good, "chosen": good, "rejected": bad, **steps}))
    path.write_text("\n".join(lines) + "\n")
    model, tokenizer = builtin_model("builtin:tiny-digits", seed=7)
    model.save_pretrained(path.parent / "teacher")
    tokenizer.save_pretrained(path.parent / "teacher")


def make_runs(out: Path, deployment: str, names: Sequence[str]) -> None:
    """In a process of its own: the runs of these algorithms, with one thread and without plots."""
    torch.set_num_threads(1)
    without_report()
    if deployment == "ddp":
        # One group for all runs: a strategy uses the one it finds.
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE_SECONDS))
    with one_ray() if deployment == "ray" else nullcontext():
        for name in names:
            train(run_file(name, deployment, out / "data.jsonl"), output=out / f"{name}-{deployment}")


@contextmanager
def one_ray() -> Iterator[None]:
    """Ray, as the transport starts it, for all runs inside."""
    from rlhf_ray.cluster import connect
    from rlhf_ray.config import RayConfig

    with quick_workers(), connect(RayConfig()):
        yield
