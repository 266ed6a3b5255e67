"""`reference_every` in whole runs: the KL starts again at each refresh, and a resume repeats the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from running import forked_ranks

from rlhf_core import train
from rlhf_core.errors import ConfigError
from rlhf_testing.runs import tiny_run

TIMED = ("time/", "tokens_per_second/", "memory/", "reward_calls/")


def run_file(algorithm: dict[str, Any], **changes: Any) -> dict[str, Any]:
    sizes = {"episodes": 4, "prompts_per_episode": 4, "samples_per_prompt": 2, "train_batch_size": 8}
    base = {"rewards": [{"name": "length", "target_tokens": 2}], "train": sizes, "checkpoint": {"every_episodes": 1}}
    return tiny_run({"algorithm": algorithm, **base, **changes})


def lines(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith(TIMED)} for line in found]


@pytest.mark.parametrize(
    ("algorithm", "strategy"),
    [
        ({"name": "grpo", "reference_every": 2}, "single"),
        ({"name": "ppo", "reference_every": 2}, "torch-ddp"),
        ({"name": "grpo", "reference_every": 2}, "ddp"),
        ({"name": "ppo", "reference_every": 2}, "low-level-zero"),
        ({"name": "online-dpo", "reference_every": 2, "reference_mix": 0.5}, "single"),
    ],
)
@pytest.mark.slow_except("algorithm0-single", "algorithm1-torch-ddp", "algorithm4-single")
def test_the_kl_is_relative_to_the_newest_reference(algorithm: dict[str, Any], strategy: str, tmp_path: Path) -> None:
    changes = {"strategy": {"name": strategy}, "optimizer": {"lr": 1e-2}}
    train(run_file(algorithm, **changes), output=tmp_path / "run")
    kl = [abs(line["kl/mean"]) for line in lines(tmp_path / "run")]
    assert kl[0] < 1e-5 and kl[1] > 1e-4 and kl[3] > 1e-4
    assert (kl[2] < 1e-5) == (algorithm.get("reference_mix", 1.0) == 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["torch-ddp", "ddp", "low-level-zero"])
def test_two_processes_refresh_and_resume_as_one(strategy: str, tmp_path: Path) -> None:
    """Each process stores a part of the reference. The run is stopped between two refreshes."""
    algorithm = {"name": "grpo", "reference_every": 2, "reference_mix": 0.4}
    # A large eps: Adam would make whole steps out of gradients that are only rounding.
    run = run_file(algorithm, optimizer={"lr": 1e-2, "eps": 1e-3})
    train(run, output=tmp_path / "alone")
    run["strategy"] = {"name": strategy}
    with forked_ranks():
        half = {**run, "train": {**run["train"], "episodes": 3}}
        train(half, output=tmp_path / "run", num_processes=2, trust=True)
        train(run, output=tmp_path / "run", resume="auto", num_processes=2, trust=True)
    ours, theirs = lines(tmp_path / "run"), lines(tmp_path / "alone")
    assert len(ours) == len(theirs) == 4
    for mine, other in zip(ours, theirs, strict=True):
        for key in ("kl/mean", "loss/policy", "policy/grad_norm", "reward/mean"):
            assert mine[key] == pytest.approx(other[key], rel=1e-3, abs=1e-5), (mine["episode"], key)


@pytest.mark.parametrize("mix", [1.0, 0.4])
@pytest.mark.slow_except("0.4")
def test_a_resume_restores_the_reference(mix: float, tmp_path: Path) -> None:
    """Stopped between two refreshes, when the reference is neither the start policy nor the newest one."""
    algorithm = {"name": "grpo", "reference_every": 2, "reference_mix": mix}
    whole = run_file(algorithm, optimizer={"lr": 1e-2})
    train(whole, output=tmp_path / "whole")
    train({**whole, "train": {**whole["train"], "episodes": 3}}, output=tmp_path / "run")
    train(whole, output=tmp_path / "run", resume="auto")
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "lora": ({"model": {"lora": {"r": 2}}}, "the policy without its adapter, which has no weights to refresh"),
    "fsdp": ({"strategy": {"name": "fsdp"}}, "strategy fsdp shards its models"),
    "gemini": ({"strategy": {"name": "gemini"}}, "strategy gemini shards its models"),
    "ray": ({"transport": {"name": "ray"}}, "over ray each maker has its own reference"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_refreshed_is_refused(name: str) -> None:
    changes, message = REFUSED[name]
    with pytest.raises(ConfigError, match=rf"algorithm\.reference_every: .*{message}"):
        train(run_file({"name": "grpo", "reference_every": 1}, **changes), dry_run=True)


def test_options_without_a_reference_are_refused() -> None:
    with pytest.raises(ConfigError, match="refreshes a reference, but kl_coef: 0 runs without one"):
        train(run_file({"name": "grpo", "reference_every": 1, "kl_coef": 0}), dry_run=True)
    with pytest.raises(ConfigError, match=r"reference_mix: mixes a refreshed reference"):
        train(run_file({"name": "grpo", "reference_mix": 0.5}), dry_run=True)
