"""The same run file but one word, for two processes or detached on Ray: equal metrics for every algorithm.

Each advantage estimator, policy loss, KL estimator and weight is in one of them. `make test` has an update of each on
ranks that are threads; the runs are slow.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import algorithm_runs
import pytest
import torch
from algorithm_runs import ALGORITHMS, ROLLOUTS, make_runs
from one_update import one_update
from running import Forked, ranks, run_all

TIMED = ("time/", "tokens_per_second/", "memory/", "reward_calls/")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In one process, and as two ranks as a launcher starts them, at the same time."""
    out, names = tmp_path_factory.mktemp("runs"), list(ALGORITHMS)
    algorithm_runs.write_data(out / "data.jsonl")
    run_all(
        Forked(make_runs, out, "single", names), *(Forked(make_runs, out, "ddp", names, env=each) for each in ranks(2))
    )
    return out


@pytest.fixture(scope="module")
def detached(runs: Path, ray_worker_source: None) -> None:
    run_all(Forked(make_runs, runs, "ray", list(ALGORITHMS)))


def lines(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith(TIMED)} for line in found]


# `distill` needs a teacher's log-probs: its own tests do the same.
@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name.startswith(ROLLOUTS) and "distill" not in name])
def test_ranks_update_as_one(name: str) -> None:
    options = {"kl_coef": 0.05, **ALGORITHMS[name]}
    ((sums, gradient, metrics),) = one_update(options, 1)
    assert gradient.abs().max() > 0
    for ours, theirs, told in one_update(options, 3):
        assert ours == pytest.approx(sums, rel=1e-4, abs=1e-5)
        torch.testing.assert_close(theirs, gradient, rtol=1e-4, atol=1e-6)
        assert told == pytest.approx(metrics, rel=1e-4, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize(("deployment", "rel", "abs_"), [("ray", 1e-6, 1e-6), ("ddp", 2e-4, 2e-5)])
def test_every_placement_trains_as_one_process(
    runs: Path, deployment: str, rel: float, abs_: float, name: str, request: pytest.FixtureRequest
) -> None:
    if deployment == "ray":
        request.getfixturevalue("detached")
    one, other = lines(runs / f"{name}-single"), lines(runs / f"{name}-{deployment}")
    assert len(one) == len(other) > 0
    for ours, theirs in zip(other, one, strict=True):
        if deployment == "ddp":
            assert set(ours) == set(theirs), ours["step"]
        for key, value in theirs.items():
            if deployment == "ddp" and key == "preference/accuracy" and ours["step"] == 1:
                continue  # the policy still is the reference: the sign of a margin is that of its rounding
            assert ours[key] == pytest.approx(value, rel=rel, abs=abs_), (ours["step"], key)


@pytest.mark.slow
@pytest.mark.parametrize("deployment", algorithm_runs.DEPLOYMENTS)
def test_held_out_prompts_are_answered(runs: Path, detached: None, deployment: str) -> None:
    assert "eval/score" in lines(runs / f"sft-{deployment}")[-1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sft", "dpo", "reward-model"])
def test_held_out_records_are_measured(runs: Path, name: str) -> None:
    assert "eval/loss/policy" in lines(runs / f"{name}-ddp")[-1]
