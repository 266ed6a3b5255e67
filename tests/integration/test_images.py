"""Runs with images: equal in one process, in two, on Ray at staleness 0, and across a resume."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from run_files import metrics, samples

from rlhf_core import train

pytestmark = pytest.mark.slow
TRAIN = {"episodes": 2, "prompts_per_episode": 4, "samples_per_prompt": 2, "train_batch_size": 4, "seed": 3}
RUN: dict[str, Any] = {
    "model": {"path": "builtin:tiny-vision"},
    "prompts": {"name": "drawn-digits", "size": 12},
    "algorithm": {"name": "grpo", "kl_coef": 0.05},
    "rewards": [{"name": "exact-match"}, {"name": "length", "target_tokens": 1, "weight": 0.1}],
    "engine": {"name": "hf", "max_new_tokens": 3},
    "optimizer": {"lr": 1e-3},
    "checkpoint": {"every_episodes": 1},
    "train": TRAIN,
    "logging": {"tensorboard": False},
}
RAY = {"name": "ray", "num_makers": 2, "num_trainers": 1, "max_staleness": 0}


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("single") / "run"
    train(RUN, output=folder)
    return folder


def assert_equal(one: Path, other: Path) -> None:
    ours, theirs = metrics(one), metrics(other)
    assert len(ours) == len(theirs) == 4
    for mine, yours in zip(ours, theirs, strict=True):
        assert mine["rollout/logprob_gap_max"] < 1e-4
        for key in set(yours) - {"rollout/logprob_gap_max"}:
            assert mine[key] == pytest.approx(yours[key], rel=1e-4, abs=1e-5), (mine["step"], key)
    assert sorted(each["completion"] for each in samples(one)) == sorted(each["completion"] for each in samples(other))
    names = [sorted(path.name for path in (run / "images").iterdir()) for run in (one, other)]
    assert names[0] == names[1]


@pytest.mark.parametrize("strategy", ["torch-ddp", "fsdp"])
def test_two_processes_train_as_one(single: Path, tmp_path: Path, strategy: str) -> None:
    train({**RUN, "strategy": {"name": strategy}}, output=tmp_path / "run", num_processes=2)
    assert_equal(tmp_path / "run", single)


def test_makers_on_ray_train_as_one_process(single: Path, tmp_path: Path) -> None:
    train({**RUN, "transport": RAY}, output=tmp_path / "run")
    assert_equal(tmp_path / "run", single)


def test_a_resume_changes_nothing(single: Path, tmp_path: Path) -> None:
    train({**RUN, "train": {**TRAIN, "episodes": 1}}, output=tmp_path / "run")
    train(RUN, output=tmp_path / "run", resume="auto")
    assert_equal(tmp_path / "run", single)


def observing(folder: Path) -> dict[str, Any]:
    """A run of the game that `docs/images.md` shows, which draws its board before each turn."""
    page = Path(__file__).resolve().parents[2] / "docs" / "images.md"
    (block,) = re.findall(r"```python\n(# lamp\.py\n.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    (folder / "lamp.py").write_text(block)
    run = {name: value for name, value in RUN.items() if name not in ("prompts", "rewards")}
    return {**run, "environment": {"name": f"{folder}/lamp.py:Lamp", "max_turns": 3}}


@pytest.fixture(scope="module")
def game(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("game")
    train(observing(folder), output=folder / "run", trust=True)
    return folder / "run"


@pytest.mark.parametrize("change", [{"strategy": {"name": "torch-ddp"}}, {"transport": RAY}], ids=["ddp", "ray"])
def test_images_in_observations_train_as_in_one_process(game: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    num_processes = 2 if "strategy" in change else 1
    train({**observing(tmp_path), **change}, output=tmp_path / "run", trust=True, num_processes=num_processes)
    assert_equal(tmp_path / "run", game)
