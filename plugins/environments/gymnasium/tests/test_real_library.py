"""With the library itself: the contract, whole runs, and what its environments look like in text."""

import json

import pytest

from rlhf_core import train
from rlhf_gymnasium.config import GymnasiumConfig
from rlhf_gymnasium.game import Game
from rlhf_testing.contracts import EnvironmentContract
from rlhf_testing.runs import tiny_run

pytest.importorskip("gymnasium", reason="needs Gymnasium: make setup-gymnasium")

pytestmark = pytest.mark.slow

DIRECTIONS = ("left", "down", "right", "up")


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
    assert game.begin(3) == "0:\n[S]FFF\nFHFH\nFFFH\nHFFG"
    assert game.step("go right").text == "1:\n  (Right)\nS[F]FF\nFHFH\nFFFH\nHFFG"
    ways = [game.step(each) for each in ("left", "down", "down", "right", "right", "down", "right")]
    assert [(step.reward, step.ended) for step in ways][-2:] == [(0.0, None), (1.0, "done")]
    game.close()


def test_the_librarys_time_limit_truncates(tmp_path):
    game = Game(GymnasiumConfig(env_id="FrozenLake-v1", kwargs={"max_episode_steps": 2}), tmp_path)
    game.begin(0)
    assert [game.step("3").ended for _ in range(2)] == [None, "truncated"]
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
