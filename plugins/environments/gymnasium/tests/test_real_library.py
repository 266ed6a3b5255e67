"""With the library itself: the contract, whole runs, and what its environments look like in text."""

import json
from types import SimpleNamespace

import pytest

from rlhf_core import train
from rlhf_gymnasium.config import GymnasiumConfig
from rlhf_gymnasium.game import Game
from rlhf_testing.contracts import EnvironmentContract
from rlhf_testing.runs import tiny_run

pytest.importorskip("gymnasium", reason="needs Gymnasium: make setup-extras")

pytestmark = pytest.mark.slow

DIRECTIONS = ("left", "down", "right", "up")


def step(game, text):
    return game.step(SimpleNamespace(text=text))


class TestFrozenLake(EnvironmentContract):
    plugin = "gymnasium"
    options = {"env_id": "FrozenLake-v1", "actions": list(DIRECTIONS), "observation": "{render}"}
    replies = DIRECTIONS
    max_turns = 6


class TestTaxi(EnvironmentContract):
    plugin = "gymnasium"
    options = {"env_id": "Taxi-v4", "invalid_action": "end", "invalid_reward": -10.0}
    replies = ("0", "go 3", "4")


class TestBlackjack(EnvironmentContract):
    plugin = "gymnasium"
    options = {"env_id": "Blackjack-v1", "actions": ["stick", "hit"]}
    replies = ("hit", "I stick")


def test_frozen_lake_in_text(tmp_path):
    options = {"env_id": "FrozenLake-v1", "kwargs": {"is_slippery": False}, "observation": "{observation}:\n{render}"}
    game = Game(GymnasiumConfig(**options, actions=list(DIRECTIONS)), tmp_path)
    assert game.reset(SimpleNamespace(seed=3)) == "0:\n[S]FFF\nFHFH\nFFFH\nHFFG"
    assert step(game, "go right")[0] == "1:\n  (Right)\nS[F]FF\nFHFH\nFFFH\nHFFG"
    ways = [step(game, each) for each in ("left", "down", "down", "right", "right", "down", "right")]
    assert [way[1:] for way in ways][-2:] == [(0.0, False), (1.0, True)]
    game.close()


def test_the_librarys_time_limit_truncates(tmp_path):
    game = Game(GymnasiumConfig(env_id="FrozenLake-v1", kwargs={"max_episode_steps": 2}), tmp_path)
    game.reset(SimpleNamespace(seed=0))
    assert [step(game, "3")[2] for _ in range(2)] == [False, "truncated"]
    game.close()


@pytest.mark.parametrize(("env_id", "max_turns"), [("FrozenLake-v1", 4), ("Taxi-v4", 3)])
def test_it_trains(tmp_path, env_id, max_turns):
    section = {
        "name": "gymnasium",
        "env_id": env_id,
        "observation": ">{observation},",
        "invalid_action": "end",
        "invalid_reward": -1.0,
        "max_turns": max_turns,
    }
    changes = {"environment": section, "prompts": {"name": "tasks"}, "rewards": [], "logging": {"samples": "all"}}
    result = train(tiny_run(changes), output=tmp_path / "run")
    assert result.summary["status"] == "done"
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 16
    starts = {}
    for sample in samples:
        assert sample["prompt"] == starts.setdefault(sample["sample_id"] // 2, sample["prompt"])
