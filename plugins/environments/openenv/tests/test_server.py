"""With a server of the library on this machine: the contract, whole runs, and servers that fail."""

import json
import logging
import socket
from functools import cache
from pathlib import Path

import pytest
from playing import Reworded
from running import wait_until

from rlhf_core import train
from rlhf_core.config.problems import Problems
from rlhf_core.errors import EpisodeError
from rlhf_core.plugins.functions import run_file
from rlhf_core.types import SamplingParams
from rlhf_episodes.player import build_environment_player
from rlhf_episodes.selected import resolve_environment
from rlhf_testing.contracts import EnvironmentContract
from rlhf_testing.episodes import episode_tokenizer, prompt_stream
from rlhf_testing.runs import tiny_run

pytest.importorskip("openenv", reason="needs OpenEnv: make setup-extras")

pytestmark = pytest.mark.slow


@cache
def game():
    """The module `game_server`, whose imports take seconds."""
    return run_file(Path(__file__).with_name("game_server.py"), "test")


@pytest.fixture(scope="module")
def server():
    with game().serving() as address:
        yield address


class TestGame(EnvironmentContract):
    plugin = "openenv"
    options = {"observation_field": "hint"}
    replies = ('{"number": 3}', 'I say {"number": 1}', '{"number": "many"}')

    @pytest.fixture(scope="class")
    @classmethod
    def given(cls, server):
        return {**cls.options, "base_url": server}


def play(address, *replies, samples=1, **options):
    """The episodes of a policy that says these replies."""
    problems = Problems()
    section = {"name": "openenv", "base_url": address, "observation_field": "hint", **options}
    environment = resolve_environment(section, problems)
    problems.raise_if_any("test")
    tokenizer = episode_tokenizer(chat=False)
    sampling = SamplingParams(max_new_tokens=60)
    player = build_environment_player(environment, Reworded(tokenizer, replies), tokenizer, sampling=sampling, seed=0)
    stream = prompt_stream([{"prompt": ""}] * samples, tokenizer, seed=0, may_be_empty=True)
    return list(player.play([(stream.prompt(place), place) for place in range(samples)]))


def guess(number):
    return json.dumps({"number": number})


def test_an_episode_to_its_end(server):
    (played,) = play(server, guess(-1), "7", guess(9), *map(guess, range(5)), instructions="Find it.\n")
    (row,) = played.rows
    assert row.text == "Find it.\n0 to 4?"
    told = [turn.text for turn in row.turns if turn.role == "environment"]
    assert told[:3] == ["higher", "error: there is no JSON object in this reply\nhigher", "lower"]
    assert (
        played.rows[0].columns["environment"]["own/invalid_actions"],
        played.rows[0].columns["environment"]["truncated"],
    ) == (1.0, 0.0)
    rewards = list(played.turn_rewards.values())
    assert rewards[:3] == [-0.5, 0.0, -0.5] and rewards[-1] == 1.0


def test_what_the_server_does_not_take_is_told(server):
    (played,) = play(server, '{"nomber": 1}', guess("x"), max_turns=2, invalid_reward=-2.0)
    assert played.turn_rewards == {0: -2.0, 1: -2.0}
    assert played.rows[0].turns[1].text.startswith("error: the environment does not take this action: Invalid message")
    assert played.rows[0].columns["environment"]["truncated"] == 1.0


def test_text_as_an_action_and_all_of_an_observation():
    with game().serving(action=game().Word) as address:
        (played,) = play(address, " 9\n", action_field="word", observation_field=None, max_turns=2)
    assert played.rows[0].text == '{"hint": "0 to 4?", "guesses": 0}'
    assert played.rows[0].turns[1].text == '{"hint": "lower", "guesses": 1}'


def test_options_of_reset(server):
    (played,) = play(server, guess(9), reset={"highest": 2})
    assert played.rows[0].text == "0 to 1?"


def test_every_session_is_closed(server):
    before = game().Game.closed
    play(server, guess(9), samples=5, max_turns=2)
    wait_until(lambda: game().Game.closed == before + 5, "five sessions are closed")


def test_a_server_that_fails(server):
    with pytest.raises(EpisodeError, match=rf"{server} failed while making a step: Server error: .*out of luck"):
        play(server, guess(13))
    assert [played.rows for played in play(server, guess(13), on_failure="drop")] == [()]


def test_a_server_that_is_slow(server, caplog):
    caplog.set_level(logging.WARNING)
    with pytest.raises(EpisodeError, match="did not return within 0.5 s"):
        play(server, guess(14), timeout_seconds=0.5)
    wait_until(lambda: "the OpenEnv server was canceled while making a step" in caplog.text, "the log says so")


def test_a_server_without_room(server):
    with game().serving(sessions=1) as address, pytest.raises(EpisodeError) as raised:
        play(address, guess(9), samples=4)
    assert "environment.concurrency" in raised.value.hint


def test_a_server_that_goes_away():
    with game().serving() as address:
        pass
    with pytest.raises(EpisodeError, match="failed while connecting: .*Connect call failed") as raised:
        play(address, guess(9))
    assert "check that the server is running and" in raised.value.hint


def test_what_is_no_server(caplog):
    caplog.set_level(logging.WARNING)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(EpisodeError, match="did not return within 0.5 s"),
    ):
        play(f"http://127.0.0.1:{silent.getsockname()[1]}", guess(9), timeout_seconds=0.5)
    wait_until(lambda: "was canceled while connecting" in caplog.text, "the log says so")


def test_it_trains(server, tmp_path):
    with game().serving(action=game().Word) as address:
        section = {"name": "openenv", "base_url": address, "action_field": "word", "max_turns": 2}
        changes = {
            "environment": {**section, "instructions": ">", "observation_field": "guesses", "on_failure": "zero"},
            "prompts": {"name": "tasks"},
            "rewards": [],
            "logging": {"samples": "all"},
        }
        result = train(tiny_run(changes), output=tmp_path / "run")
    assert result.summary["status"] == "done"
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 16 and all(sample["prompt"] == ">0" for sample in samples)
