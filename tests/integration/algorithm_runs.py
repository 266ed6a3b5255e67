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
from running import PATIENCE_SECONDS

from rlhf_core import report, train
from rlhf_core.models.builtin import build_builtin

ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"name": "grpo", "importance_cap": 2.0, "dynamic_sampling": True},
    "grpo-sequence": {"name": "grpo", "policy_loss": "gspo", "aggregation": "sequence-mean-token-mean"},
    "rloo": {"name": "rloo", "policy_loss": "cispo", "aggregation": "sequence-mean-token-sum-norm"},
    "reinforce": {"name": "reinforce++", "entropy_coef": 0.01},
    "distill": {"name": "distill", "top_k": 6, "divergence": "jsd"},
    "distill-sampled": {"name": "distill", "reward_coef": 0.5},
    "sft": {"name": "sft", "packing": True, "max_tokens": 32},
    "dpo": {"name": "dpo"},
    "kto": {"name": "kto"},
    "orpo": {"name": "orpo"},
    "simpo": {"name": "simpo"},
    "reward-model": {"name": "reward-model", "centring_coef": 0.01},
    "process-reward-model": {"name": "process-reward-model", "step_separator": ","},
}
ROLLOUTS = ("grpo", "rloo", "reinforce", "distill")

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
    if name.startswith(ROLLOUTS):
        run["engine"] = {"name": "hf", "max_new_tokens": 6}
        run["rewards"] = [{"name": "length", "target_tokens": 2}]
        run["train"] |= {"samples_per_prompt": 3, "train_batch_size": 14}
        if name.startswith("distill"):
            run["algorithm"] = {**run["algorithm"], "teacher": {"path": str(data.parent / "teacher")}}
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
    model, tokenizer = build_builtin("builtin:tiny-digits", seed=7)
    model.save_pretrained(path.parent / "teacher")
    tokenizer.save_pretrained(path.parent / "teacher")


def make_runs(out: Path, deployment: str, names: Sequence[str]) -> None:
    """In a process of its own: the runs of these algorithms, with one thread and without plots."""
    torch.set_num_threads(1)
    report.build_report = lambda folders: None
    if deployment == "ddp":
        # One group for all runs: a strategy uses the one it finds.
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE_SECONDS))
    with one_ray() if deployment == "ray" else nullcontext():
        for name in names:
            train(run_file(name, deployment, out / "data.jsonl"), output=out / f"{name}-{deployment}")


@contextmanager
def one_ray() -> Iterator[None]:
    """Ray, as the transport starts it, for all runs inside."""
    from rlhf_ray.cluster import connected
    from rlhf_ray.config import RayConfig

    with quick_workers(), connected(RayConfig()):
        yield
