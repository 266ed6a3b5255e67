"""Episodes over a small library of the same form; options; selecting it where the real one is missing."""

import asyncio
from importlib.util import find_spec

import pytest
from pydantic import ValidationError
from running import wait_until

from rlhf_core import train
from rlhf_core.components import TaskContext
from rlhf_core.errors import ConfigError, PluginError
from rlhf_core.plugins import load
from rlhf_core.types import Prompt
from rlhf_episodes import Reply, Task
from rlhf_gymnasium.config import GymnasiumConfig
from rlhf_gymnasium.environment import build
from rlhf_gymnasium.game import Game
from rlhf_testing.runs import tiny_run


def game(tmp_path, **options):
    return Game(GymnasiumConfig(**{"env_id": "Line-v0", **options}), tmp_path)


@pytest.mark.usefixtures("fake_library")
def test_an_episode_from_its_seed_to_the_goal(tmp_path):
    played = game(tmp_path, instructions="Go. ", observation="at {observation}\n{render}")
    assert played.begin(4) == "Go. at 0\n[X]"
    steps = [played.step(text) for text in ("1", "and 1", "0", "1")]
    assert [step.text for step in steps[:3]] == ["at 1\n_[X]", "at 2\n__[X]", "at 2\n__[X]"]
    assert [(step.reward, step.ended) for step in steps] == [(0, None), (0, None), (0, None), (1, "done")]
    assert game(tmp_path).begin(5) == "1"


@pytest.mark.usefixtures("fake_library")
def test_time_that_is_up_is_no_end(tmp_path):
    played = game(tmp_path, kwargs={"limit": 2})
    played.begin(0)
    assert [played.step("0").ended for _ in range(2)] == [None, "truncated"]


@pytest.mark.usefixtures("fake_library")
@pytest.mark.parametrize(
    ("options", "told", "ended"),
    [
        ({}, "There is no action in this reply. Actions: 0 to 1.\n0", None),
        ({"actions": ["stay", "go"]}, "There is no action in this reply. Actions: stay, go.\n0", None),
        ({"invalid_action": "end"}, "There is no action in this reply. Actions: 0 to 1.\n0", "done"),
    ],
)
def test_a_reply_without_an_action(tmp_path, options, told, ended):
    played = game(tmp_path, invalid_reward=-0.5, **options)
    played.begin(0)
    step = played.step("hm 7")
    assert (step.text, step.reward, step.ended, step.is_valid) == (told, -0.5, ended, False)


@pytest.mark.usefixtures("fake_library")
def test_functions_of_files(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def see(observation, info): return f'{observation} after {info[\"steps\"]}'\n"
        "def act(text): return {'go': 1, 'stay': 0}.get(text)\n"
    )
    played = game(tmp_path, observation="mine.py:see", read_action="mine.py:act", kwargs={"box": True})
    assert played.begin(0) == "0 after 0"
    assert played.step("go").text == "1 after 1"
    assert played.step("fly").text == "There is no action in this reply.\n1 after 1"
    with pytest.raises(PluginError, match="no such file"):
        game(tmp_path, observation="other.py:see")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"env_id": "Lime-v0"}, "Lime-v0` doesn't exist"),
        ({"kwargs": {"gaol": 1}}, "gymnasium.make fails: TypeError.*gaol"),
        ({"kwargs": {"box": True}}, r"actions of Box\(2,\), which are not numbered"),
        ({"actions": ["a", "b", "c"]}, "has 3 names, but the environment has 2 actions"),
    ],
)
def test_what_the_library_refuses_names_the_option(fake_library, tmp_path, options, said):
    closed = fake_library.closed
    with pytest.raises(ConfigError, match=said) as raised:
        game(tmp_path, **options)
    assert "environment." in str(raised.value) and raised.value.hint
    assert fake_library.closed - closed == ("env_id" not in options and "gaol" not in options.get("kwargs", {}))


class Scripted:
    """A policy that says what it is told to."""

    def __init__(self, texts, max_turns=8):
        self.texts, self.remaining_turns, self.seen = list(texts), max_turns, []

    async def turn(self, messages=None, tools=(), stop=()):
        self.seen.append(messages)
        self.remaining_turns -= 1
        turn = len(self.seen) - 1
        text = self.texts[turn]
        return Reply(text=text, tool_calls=(), token_ids=(), finish_reason="stop", turn=turn, policy_version=0)


def run(tmp_path, policy, **options):
    environment = build(GymnasiumConfig(**{"env_id": "Line-v0", **options}), TaskContext(seed=0, base_folder=tmp_path))
    prompt = Prompt(position=0, text="", prompt_ids=())
    return asyncio.run(environment.run(Task(prompt=prompt, sample_id=0, seed=0, sample_seed=0), policy))


def test_each_turn_its_reward_and_a_closed_environment(fake_library, tmp_path):
    closed = fake_library.closed
    policy = Scripted(["1", "?", "1", "1"])
    outcome = run(tmp_path, policy, invalid_reward=-1.0)
    assert (outcome.status, outcome.metrics) == ("done", {"invalid_actions": 1.0})
    assert outcome.turn_rewards == {0: 0.0, 1: -1.0, 2: 0.0, 3: 1.0}
    assert policy.seen[0] == "0"
    wait_until(lambda: fake_library.closed == closed + 1, "the environment is closed")


@pytest.mark.parametrize(("turns", "limit"), [(8, 2), (2, 8)])
def test_the_librarys_bound_and_cores_truncate(fake_library, tmp_path, turns, limit):
    outcome = run(tmp_path, Scripted("00000000", max_turns=turns), kwargs={"limit": limit})
    assert outcome.status == "truncated"
    assert outcome.turn_rewards == {0: 0.0, 1: 0.0}


def test_an_environment_that_fails_is_closed(fake_library, tmp_path, monkeypatch):
    def step(self, action):
        raise SystemExit(3)

    monkeypatch.setattr(fake_library, "step", step)
    closed = fake_library.closed
    with pytest.raises(RuntimeError, match="raised SystemExit: 3"):
        run(tmp_path, Scripted(["1"]))
    wait_until(lambda: fake_library.closed == closed + 1, "the environment is closed")


@pytest.mark.usefixtures("fake_library")
def test_it_trains(tmp_path):
    section = {
        "name": "gymnasium",
        "env_id": "Line-v0",
        "observation": ">{observation},",
        "invalid_action": "end",
        "max_turns": 3,
    }
    changes = {"environment": section, "prompts": {"name": "tasks"}, "rewards": []}
    result = train(tiny_run(changes), output=tmp_path / "run")
    assert result.summary["status"] == "done"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "env_id"),
        ({"env_id": ""}, "env_id"),
        ({"env_id": "a", "read_action": "act"}, "is not FILE.py:FUNCTION"),
        ({"env_id": "a", "read_action": "a.py:act", "actions": ["x"]}, "take out `actions`"),
        ({"env_id": "a", "actions": ["left", "Left"]}, "two are called 'left'"),
        ({"env_id": "a", "actions": [" "]}, "a name is empty"),
        ({"env_id": "a", "invalid_action": "retry"}, "invalid_action"),
    ],
)
def test_options_that_are_refused(options, said):
    with pytest.raises(ValidationError, match=said):
        GymnasiumConfig(**options)


@pytest.mark.skipif(find_spec("gymnasium") is not None, reason="the library is installed here")
def test_without_the_library_it_says_what_to_install():
    with pytest.raises(PluginError) as raised:
        load("environments", "gymnasium")
    assert raised.value.hint == "pip install 'rlhf-gymnasium[gymnasium]'"
