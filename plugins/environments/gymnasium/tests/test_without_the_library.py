"""Episodes over a small library of the same form; options; selecting it where the real one is missing."""

import threading
from contextlib import closing
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
from playing import Reworded, player
from pydantic import ValidationError
from running import wait_until

from rlhf_core import train
from rlhf_core.errors import ConfigError, EpisodeError, PluginError
from rlhf_core.plugins import load
from rlhf_gymnasium.config import GymnasiumConfig
from rlhf_gymnasium.game import Game
from rlhf_testing.episodes import episode_tokenizer
from rlhf_testing.runs import tiny_run
from rlhf_testing.samples import make_prompt


def said(text):
    return SimpleNamespace(text=text)


def steps(played, *texts):
    return [played.step(said(text)) for text in texts]


def game(tmp_path, **options):
    return Game(GymnasiumConfig(**{"env_id": "Line-v0", **options}), tmp_path)


@pytest.mark.usefixtures("fake_library")
def test_an_episode_from_its_seed_to_the_goal(tmp_path):
    played = game(tmp_path, instructions="Go. ", observation="at {observation}\n{render}")
    assert played.reset(SimpleNamespace(seed=4)) == "Go. at 0\n[X]"
    taken = steps(played, "1", "and 1", "0", "1")
    assert [text for text, _, _ in taken[:3]] == ["at 1\n_[X]", "at 2\n__[X]", "at 2\n__[X]"]
    assert [(reward, ended) for _, reward, ended in taken] == [(0, False), (0, False), (0, False), (1, True)]
    assert game(tmp_path).reset(SimpleNamespace(seed=5)) == "1"


@pytest.mark.usefixtures("fake_library")
def test_time_that_is_up_is_no_end(tmp_path):
    played = game(tmp_path, kwargs={"limit": 2})
    played.reset(SimpleNamespace(seed=0))
    assert [ended for _, _, ended in steps(played, "0", "0")] == [False, "truncated"]


@pytest.mark.usefixtures("fake_library")
@pytest.mark.parametrize(
    ("options", "told", "ended"),
    [
        ({}, "There is no action in this reply. Actions: 0 to 1.\n0", False),
        ({"actions": ["stay", "go"]}, "There is no action in this reply. Actions: stay, go.\n0", False),
        ({"invalid_action": "end"}, "There is no action in this reply. Actions: 0 to 1.\n0", True),
    ],
)
def test_a_reply_without_an_action(tmp_path, options, told, ended):
    played = game(tmp_path, invalid_reward=-0.5, **options)
    played.reset(SimpleNamespace(seed=0))
    assert steps(played, "hm 7") == [(told, -0.5, ended)]
    assert played.metrics == {"invalid_actions": 1.0}


@pytest.mark.usefixtures("fake_library")
def test_functions_of_files(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def see(observation, info): return f'{observation} after {info[\"steps\"]}'\n"
        "def act(text): return {'go': 1, 'stay': 0}.get(text)\n"
    )
    played = game(tmp_path, observation="mine.py:see", read_action="mine.py:act", kwargs={"box": True})
    assert played.reset(SimpleNamespace(seed=0)) == "0 after 0"
    told = [text for text, _, _ in steps(played, "go", "fly")]
    assert told == ["1 after 1", "There is no action in this reply.\n1 after 1"]
    with pytest.raises(PluginError, match="no such file"):
        game(tmp_path, observation="other.py:see")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"env_id": "Lime-v0"}, "Lime-v0` doesn't exist"),
        ({"kwargs": {"gaol": 1}}, "gymnasium.make failed: TypeError.*gaol"),
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


def play(tmp_path, texts, max_turns=8, timeout_seconds=60.0, **options):
    tokenizer = episode_tokenizer(chat=False)
    bounds = {"max_turns": max_turns, "timeout_seconds": timeout_seconds}
    made = player(partial(game, tmp_path, **options), engine=Reworded(tokenizer, texts), tokenizer=tokenizer, **bounds)
    with closing(made) as playing:
        (played,) = playing.play([(make_prompt(0, text=""), 0)])
    return played, played.rows[0].columns["environment"]


def test_each_turn_its_reward_and_a_closed_environment(fake_library, tmp_path):
    closed = fake_library.closed
    played, measured = play(tmp_path, ["1", "?", "1", "1"], invalid_reward=-1.0)
    assert (measured["truncated"], measured["own/invalid_actions"]) == (0.0, 1.0)
    assert played.turn_rewards == {0: 0.0, 1: -1.0, 2: 0.0, 3: 1.0}
    assert fake_library.closed == closed + 1


@pytest.mark.parametrize(("turns", "limit"), [(8, 2), (2, 8)])
def test_the_librarys_bound_and_cores_truncate(fake_library, tmp_path, turns, limit):
    played, measured = play(tmp_path, "0", max_turns=turns, kwargs={"limit": limit})
    assert measured["truncated"] == 1.0
    assert played.turn_rewards == {0: 0.0, 1: 0.0}


def test_an_environment_that_fails_is_closed(fake_library, tmp_path, monkeypatch):
    def step(self, action):
        raise SystemExit(3)

    monkeypatch.setattr(fake_library, "step", step)
    closed = fake_library.closed
    with pytest.raises(EpisodeError, match="step raised SystemExit: 3"):
        play(tmp_path, "1")
    assert fake_library.closed == closed + 1


@pytest.mark.slow
def test_an_environment_is_closed_once_its_step_no_longer_hangs(fake_library, tmp_path, monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(fake_library, "step", lambda self, action: release.wait())
    closed = fake_library.closed
    with pytest.raises(EpisodeError, match=r"step did not return within 0.2 s"):
        play(tmp_path, "1", timeout_seconds=0.2)
    assert fake_library.closed == closed
    release.set()
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
        ({"env_id": "a", "read_action": "a.py:act", "actions": ["x"]}, "does not use `actions`"),
        ({"env_id": "a", "actions": ["left", "Left"]}, "two are named 'left'"),
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
