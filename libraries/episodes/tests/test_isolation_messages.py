"""What crosses between a run and the process of its environments."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.errors import ConfigError, PluginError, RlhfError
from rlhf_episodes.contract import EpisodeTruncated, Outcome
from rlhf_episodes.episode import State
from rlhf_episodes.isolation.messages import (
    BadMessage,
    EpisodeEnded,
    EpisodeFailed,
    ErrorMessage,
    FrameReader,
    TurnRequest,
    TurnResult,
    read_from_child,
    to_child,
    to_host,
    to_picklable,
)


def messages():
    turn = TurnRequest(episode=1, branch=0, turn=2, messages=[{"role": "user", "content": "é\n"}], tools=[], stop=["a"])
    outcome = Outcome(reward=0.1, turn_rewards={0: 1.0}, metrics={"speed": 2.0}, bad_tool_calls=3)
    ended = EpisodeEnded(episode=1, outcome=outcome)
    failed = EpisodeFailed(episode=1, error=ErrorMessage.of(PluginError("no", where="here", hint="do")))
    return [turn, ended, failed]


@given(st.lists(st.integers(1, 40), max_size=20))
def test_messages_come_over_whole_however_they_are_cut(cuts):
    data = b"".join(to_host(message.model_dump()) for message in messages())
    frames, found = FrameReader(1000), []
    for cut in [*cuts, len(data)]:
        frames.feed(data[:cut])
        data = data[cut:]
        while (frame := frames.take()) is not None:
            found.append(read_from_child(frame))
    assert found == messages()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04.",
        b"[" * 100_000,
        b'{"type": "none"}',
        b'{"type": "call-started", "episode": "1", "call": "step"}',
        b'{"type": "turn-canceled", "episode": 1, "turn": 1, "more": 1}',
        b'{"type": "turn-canceled", "episode": 1, "turn": ' + b"9" * 5000 + b"}",
        b'{"type": "ended", "episode": 1, "outcome": {"reward": NaN}}',
        b'{"type": "ended", "episode": 1, "outcome": {"reward": "1"}}',
        b'{"type": "ended", "episode": 1, "outcome": {"status": "over"}}',
        b'{"type": "ended", "episode": 1, "outcome": {"turn_rewards": {"first": 1}}}',
        b'{"type": "failed", "episode": 1, "fault": "' + b"x" * 10_001 + b'"}',
    ],
)
def test_what_is_none_is_named(data):
    with pytest.raises(BadMessage, match="wrote an invalid message"):
        read_from_child(data)


def test_a_message_that_is_too_long_is_refused_before_it_has_come():
    frames = FrameReader(10)
    frames.feed(b"\0\0\0\x0b")
    with pytest.raises(BadMessage, match="wrote a message of 11 bytes, more than 10"):
        frames.take()


@pytest.mark.parametrize("content", ["\ud800", float("nan"), b"bytes", {1, 2}])
def test_what_is_no_json_is_an_error_of_who_says_it(content):
    with pytest.raises((TypeError, ValueError)):
        to_host({"type": "turn", "episode": 1, "messages": [{"content": content}]})


def test_errors_come_over_with_their_kind():
    class Own(ConfigError):
        pass

    error = ErrorMessage.of(Own("wrong", where="here", hint="do")).error()
    assert (type(error), error.message, error.where, error.hint) == (ConfigError, "wrong", "here", "do")
    assert type(ErrorMessage(kind="first_line", message="").error()) is RlhfError


def test_what_the_process_is_told_is_pickled_errors_included():
    class Unknown(Exception):
        pass

    state, frames = State(1, 4, None, None, can_fork=True), FrameReader()
    for error in (EpisodeTruncated("no turn"), KeyError("k"), ConfigError("no", where="here"), Unknown("why")):
        frames.feed(to_child(TurnResult(1, 2, to_picklable(error), state)))
        told = pickle.loads(frames.take()).reply
        known = not isinstance(error, Unknown)
        assert (type(told), str(told)) == ((type(error), str(error)) if known else (RuntimeError, "Unknown: why"))
