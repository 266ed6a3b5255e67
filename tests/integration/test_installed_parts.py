"""Units and passes of an installed plugin, and the columns of an environment, in real runs: same numbers anywhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_files import metrics, start

SUPPORT = Path(__file__).resolve().parents[1] / "support"
PLUGIN = """
from rlhf_core import Component, Section
from rlhf_core.config import StrategyConfig

pairs = Component(summary="Units of two rows.", config=Section, build="acme_pairs_build:pairs")
graded = Component(summary="Reads an environment's columns.", config=Section, build="acme_pairs_build:graded")
reversed_ddp = Component(
    summary="torch-ddp with other passes.",
    config=StrategyConfig,
    build="acme_pairs_build:ddp",
    launch="rlhf_strategies.run_processes:run_in_processes",
)
"""
BUILD = """
from dataclasses import replace

from unit_plugins import PairMargin, ReversedPasses

from rlhf_core.algorithm import LossOutput, Mean
from rlhf_forward import policy_forward
from rlhf_core.place import resolve_device


class Pairs(PairMargin):
    def loss(self, models, batch):
        entered = batch.action_mask.sum() * 0.0 + ReversedPasses.entered
        return replace(super().loss(models, batch), metrics={"acme/entered": Mean(entered, 1.0)})


class Graded(PairMargin):
    def units(self, items):
        return [[item] for item in items]

    def advantages(self, episode):
        columns = episode.columns
        sums = columns["grade"].clamp(min=0).sum(-1)
        exact = (columns["depth"] == episode.sample_ids).all() and columns["judge"][0]["clarity"] == 0.25
        return replace(episode, metrics={"acme/grades": float(sums.sum()), "acme/exact": float(exact)})

    def counts(self, batch):
        return {"policy": float(batch.action_mask.sum())}

    def loss(self, models, batch):
        mask, grade = batch.action_mask, batch.columns["grade"]
        assert (grade[mask] >= 0).all() and grade.min() == -1.0, "what was not sampled has the fill"
        log_probs = policy_forward(models["policy"], batch, 1.0).log_probs
        return LossOutput({"policy": -(mask * grade * log_probs).sum()}, {"acme/grade": Mean(grade.max(), 1.0)})


def pairs(config, context):
    return Pairs()


def graded(config, context):
    return Graded()


def ddp(config, context):
    from rlhf_strategies import TorchDdpConfig, TorchDdpStrategy

    strategy = TorchDdpStrategy(TorchDdpConfig(), context)
    strategy.passes = "unit_plugins:ReversedPasses"
    return strategy
"""
GAME = """
from rlhf_core import Column
from rlhf_episodes import Outcome


class Game:
    columns = {
        "grade": Column(fill=-1.0), "depth": Column(per="sample", dtype="int64"), "judge": Column(per="metrics")
    }

    async def run(self, task, policy):
        turns = [await policy.turn(), await policy.turn("7>")]
        grade = {reply.turn: [float(token) for token in reply.token_ids] for reply in turns}
        return Outcome(reward=1.0, columns={"grade": grade, "depth": task.sample_id, "judge": {"clarity": 0.25}})
"""
PAIRS: dict[str, Any] = {
    "algorithm": {"name": "pairs"},
    "train": {"episodes": 1, "prompts_per_episode": 4, "samples_per_prompt": 2, "micro_batch_tokens": 12},
}
FIRST = "loss/policy"


@pytest.fixture(autouse=True)
def acme(install: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = {
        "rlhf.algorithms": {"pairs": "acme_pairs:pairs", "graded": "acme_pairs:graded"},
        "rlhf.strategies": {"reversed-ddp": "acme_pairs:reversed_ddp"},
    }
    install("acme-pairs", points, {"acme_pairs": PLUGIN, "acme_pairs_build": BUILD})
    monkeypatch.syspath_prepend(str(SUPPORT))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}:{SUPPORT}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.parametrize(
    ("strategy", "num_processes", "enters"),
    [("torch-ddp", 2, False), ("reversed-ddp", 1, True), ("reversed-ddp", 2, True)],
)
@pytest.mark.slow_except("reversed-ddp-1-True")
def test_units_and_passes_of_a_plugin_train_alike(
    tmp_path: Path, strategy: str, num_processes: int, enters: bool
) -> None:
    """The loss of a pair asserts that its rows are together."""
    one = metrics(start(PAIRS, tmp_path / "one").run_folder)
    found = metrics(start({**PAIRS, "strategy": strategy}, tmp_path / "run", num_processes=num_processes).run_folder)
    assert len(found) == len(one) >= 1
    assert found[0][FIRST] == pytest.approx(one[0][FIRST], rel=1e-3, abs=1e-5)
    assert found[0]["policy/grad_norm"] == pytest.approx(one[0]["policy/grad_norm"], rel=1e-3)
    if num_processes == 2:
        assert (found[0]["acme/entered"] > 0) == enters


def graded(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    (tmp_path / "game.py").write_text(GAME)
    game = {"name": f"{tmp_path}/game.py:Game", "isolate": changes.pop("isolate", False)}
    train = {"episodes": 1, "prompts_per_episode": 4, "samples_per_prompt": 2, "train_batch_size": 4}
    return {"algorithm": {"name": "graded"}, "environment": game, "rewards": [], "train": train, **changes}


@pytest.mark.parametrize(
    ("changes", "num_processes"),
    [
        ({}, 1),
        ({"isolate": True}, 1),
        ({"strategy": "torch-ddp"}, 2),
        pytest.param({"transport": {"name": "ray", "max_staleness": 0}}, 1, marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("ray_worker_source")
@pytest.mark.slow_except("changes0-1", "changes1-1")
def test_columns_of_an_environment_reach_the_loss(tmp_path: Path, changes: dict[str, Any], num_processes: int) -> None:
    from quick_ray import quick_workers

    with quick_workers():
        run = graded(tmp_path, **changes)
        found = metrics(start(run, tmp_path / "run", num_processes=num_processes, trust=True).run_folder)
    assert [line["acme/exact"] for line in found] == [1.0] * len(found) == [1.0, 1.0]
    assert found[0]["acme/grades"] > 0 and all(line["acme/grade"] > 0 for line in found)


def test_a_column_of_an_environment_and_another_owner(tmp_path: Path) -> None:
    from rlhf_core.errors import ConfigError

    (tmp_path / "game.py").write_text(GAME.replace('"grade": Column', '"temperature": Column'))
    run = {"environment": {"name": f"{tmp_path}/game.py:Game"}, "rewards": []}
    with pytest.raises(ConfigError, match="core's sampling and environment .*Game.* both declare a column 'temp"):
        start(run, tmp_path / "run", trust=True)
    assert not (tmp_path / "run").exists()
