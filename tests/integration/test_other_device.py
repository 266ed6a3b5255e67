"""A tensor that is left on the wrong device fails here, on a machine without a GPU, and not on a user's card.

Whole tiny runs with every tensor of every model on a device that is not the CPU (`tests/support/other_device.py`), all
in one process that the device stays with.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from device_runs import FAULTS, PATHS, QUICK, RUNS, make_runs
from running import Forked, run_all

from rlhf_core.plugins.discovery import discover


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs")
    run_all(Forked(make_runs, out, [*QUICK, *PATHS, *FAULTS]))
    return out


@pytest.fixture(scope="module")
def other_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("other-runs")
    run_all(Forked(make_runs, out, [name for name in RUNS if name not in QUICK]))
    return out


def told(runs: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((runs / f"{name}.json").read_text())
    return found


def test_every_algorithm_of_the_repository_is_run() -> None:
    own = {name for name, ref in discover("algorithms").items() if ref.distribution.startswith("rlhf-")}
    assert own <= {changes["algorithm"]["name"] for changes in RUNS.values()}


@pytest.mark.parametrize(
    "name",
    [*(pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in RUNS), *PATHS],
)
def test_a_run_elsewhere(name: str, request: pytest.FixtureRequest) -> None:
    found = told(request.getfixturevalue("other_runs" if name in RUNS and name not in QUICK else "runs"), name)
    assert found["error"] is None, found["error"]
    assert {"aten._fused_adamw_.default", "aten.embedding.default"} <= set(found["computed"])
    # The engine's fastest path: one that fails for a tensor on the wrong device would only be slower.
    assert set(found["paths"]) <= {name if name in PATHS else "slots"}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(runs: Path, fault: str) -> None:
    assert "expected all tensors to be on elsewhere" in (told(runs, fault)["error"] or "")
