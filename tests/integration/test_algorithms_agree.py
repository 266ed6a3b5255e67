"""The same run file but one word, for two processes or detached on Ray: equal metrics for every algorithm."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(660)
SCRIPT = Path(__file__).with_name("algorithm_runs.py")
DEADLINE_SECONDS = 600
TIMED = ("time/", "tokens_per_second/", "memory/", "reward_calls/")


def _script() -> Any:
    spec = importlib.util.spec_from_file_location("algorithm_runs", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


runs_script = _script()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All runs: in one process, as two ranks as a launcher starts them, and on Ray, at the same time."""
    out = tmp_path_factory.mktemp("runs")
    runs_script.write_data(out / "data.jsonl")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for deployment, rank, world_size in (("single", 0, 1), ("ddp", 0, 2), ("ddp", 1, 2), ("ray", 0, 1)):
        env = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        if world_size > 1:
            env |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            env |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
        command = [sys.executable, str(SCRIPT), str(out), deployment]
        started.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    try:
        printed = [process.communicate(timeout=DEADLINE_SECONDS)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0, 0, 0], "\n".join(text[-3000:] for text in printed)
    return out


def lines(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith(TIMED)} for line in found]


@pytest.mark.parametrize("name", list(runs_script.ALGORITHMS))
def test_detached_trains_as_local(runs: Path, name: str) -> None:
    local, detached = lines(runs / f"{name}-single"), lines(runs / f"{name}-ray")
    assert len(local) == len(detached) > 0
    for ours, theirs in zip(detached, local, strict=True):
        for key, value in theirs.items():
            assert ours[key] == pytest.approx(value, rel=1e-6, abs=1e-6), (ours["step"], key)


@pytest.mark.parametrize("name", list(runs_script.ALGORITHMS))
def test_two_processes_train_as_one(runs: Path, name: str) -> None:
    one, two = lines(runs / f"{name}-single"), lines(runs / f"{name}-ddp")
    assert len(one) == len(two) > 0
    for ours, theirs in zip(two, one, strict=True):
        assert set(ours) == set(theirs), ours["step"]
        for key, value in theirs.items():
            assert ours[key] == pytest.approx(value, rel=2e-4, abs=2e-5), (ours["step"], key)


@pytest.mark.parametrize("deployment", runs_script.DEPLOYMENTS)
def test_held_out_prompts_are_answered(runs: Path, deployment: str) -> None:
    assert "eval/score" in lines(runs / f"sft-{deployment}")[-1]


@pytest.mark.parametrize("name", ["sft", "dpo", "reward-model"])
def test_held_out_records_are_measured(runs: Path, name: str) -> None:
    assert "eval/loss/policy" in lines(runs / f"{name}-ddp")[-1]
