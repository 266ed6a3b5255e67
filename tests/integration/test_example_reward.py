"""The example distribution of rewards is found, keeps the contract and trains, as a stranger's that was installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from running import PATIENCE_SECONDS

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "reward-plugin"
TRAIN = """
from rlhf_core import train
from rlhf_testing.runs import tiny_run
rewards = [{"name": "exact-match"}, {"name": "no-filler", "weight": 0.1}, {"name": "keyword-coverage"}]
result = train(tiny_run({"rewards": rewards, "train": {"episodes": 1}}), output="run")
assert all(f"reward/{each['name']}" in line for each in rewards for line in result.metrics)
"""


@pytest.fixture
def environment(install) -> dict[str, str]:
    """Where a fresh process finds the example as if it were installed."""
    text = (FOLDER / "pyproject.toml").read_text(encoding="utf-8")
    section = text.partition('[project.entry-points."rlhf.rewards"]')[2].partition("[")[0]
    targets = dict(re.findall(r'^(\S+) = "(\S+)"$', section, flags=re.MULTILINE))
    assert set(targets) == {"no-filler", "keyword-coverage"}
    install("rlhf-example-style", {"rlhf.rewards": targets})
    paths = [sys.path[0], str(FOLDER / "src")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def run(environment: dict[str, str], folder: Path, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_its_own_tests_pass(environment, tmp_path):
    tests = str(FOLDER / "tests")
    run(environment, tmp_path, "-m", "pytest", "-q", "--import-mode=importlib", "-p", "no:cacheprovider", tests)


@pytest.mark.slow
def test_both_rewards_train(environment, tmp_path):
    run(environment, tmp_path, "-c", TRAIN)
