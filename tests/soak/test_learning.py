"""The quickstart learns, on every seed and under every deployment (minutes each: `make soak`)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
DEADLINE_SECONDS = 3000
Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """`run(*flags)`: the summary of a quickstart with these flags, and the last accuracy on held-out pairs, if any.

    All start from one warm start; none is run twice.
    """
    root = tmp_path_factory.mktemp("soak")

    @cache
    def quickstart(*flags: str) -> dict[str, Any]:
        folder = root / f"run-{len(list(root.iterdir()))}"
        earlier = next(iter(sorted(root.glob("run-*/warm-start"))), None)
        if earlier is not None:
            shutil.copytree(earlier, folder / "warm-start")
        command = [str(Path(sys.executable).with_name("rlhf")), "train", "--output", str(folder), "--quiet", *flags]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False, env=os.environ
        )
        assert done.returncode == 0, done.stderr[-3000:]
        summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
        last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
        return {**summary, "pair_accuracy": last.get("eval/preference/accuracy")}

    return quickstart


def test_three_seeds_learn(run: Run) -> None:
    summaries = [run("--set", f"train.seed={seed}") for seed in range(3)]
    assert all(summary["eval_before"] <= 0.6 for summary in summaries)
    assert min(summary["eval_after"] for summary in summaries) >= 0.9


@pytest.mark.parametrize("strategy", ["torch-ddp", "ddp", "low-level-zero", "fsdp", "gemini"])
def test_strategies_learn_as_single(run: Run, strategy: str) -> None:
    single = run("--set", "train.seed=0")["eval_after"]
    assert run("--strategy", strategy, "--num-processes", "2")["eval_after"] == pytest.approx(single, abs=0.05)


PREFERENCES = ("dpo", "kto", "orpo", "simpo")
PLACEMENTS = {"local": (), "ddp": ("--strategy", "ddp", "--num-processes", "2"), "ray": ("--transport", "ray")}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("algorithm", ["grpo", "rloo", "reinforce++", *PREFERENCES, "reward-model"])
def test_algorithms_learn_in_every_placement(run: Run, algorithm: str, placement: str, seed: int) -> None:
    """As `benchmarks/algorithms.py` prints it."""
    summary = run("--algorithm", algorithm, *PLACEMENTS[placement], "--set", f"train.seed={seed}")
    if algorithm == "reward-model":
        assert summary["pair_accuracy"] >= 0.75  # guessing is right half the time
    elif algorithm in PREFERENCES:
        assert summary["eval_after"] >= summary["eval_before"] + 0.2
    else:
        assert summary["eval_after"] >= 0.85


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_detached_learns_as_local(run: Run, max_staleness: int) -> None:
    local = run("--set", "train.seed=0")["eval_after"]
    detached = run("--transport", "ray", "--set", f"transport.max_staleness={max_staleness}")["eval_after"]
    assert detached == pytest.approx(local, abs=0.05)
