"""What crosses between a run and the process of its environments."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.errors import ConfigError, PluginError, RlhfError
from rlhf_episodes.contract import EpisodeTruncated
from rlhf_episodes.isolation.messages import (
    BadMessage,
    Ended,
    ErrorTold,
    Failed,
    Frames,
    TurnAsked,
    error_as_told,
    read_from_child,
    to_child,
    to_host,
    told_error,
)


def messages():
    turn = TurnAsked(episode=1, branch=0, turn=2, messages=[{"role": "user", "content": "é\n"}], tools=[], stop=["a"])
    ended = Ended(
        episode=1, reward=0.1, turn_rewards=[(0, 1.0)], metrics={"speed": 2.0}, status="done", bad_tool_calls=3
    )
    failed = Failed(episode=1, error=ErrorTold.of(PluginError("no", where="here", hint="do")))
    return [turn, ended, failed]


@given(st.lists(st.integers(1, 40), max_size=20))
def test_messages_come_over_whole_however_they_are_cut(cuts):
    data, frames, found = b"".join(map(to_host, messages())), Frames(1000), []
    for cut in [*cuts, len(data)]:
        found += map(read_from_child, frames.feed(data[:cut]))
        data = data[cut:]
    assert found == messages()
    assert frames.is_empty


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04.",
        b"[" * 100_000,
        b'{"say": "none"}',
        b'{"say": "doing", "episode": "1", "call": "step"}',
        b'{"say": "pong", "ping": 1, "more": 1}',
        b'{"say": "pong", "ping": ' + b"9" * 5000 + b"}",
        b'{"say": "ended", "episode": 1, "reward": NaN, "turn_rewards": [], "metrics": {}, "status": "done"}',
        b'{"say": "ended", "episode": 1, "reward": 1, "turn_rewards": [], "metrics": {}, "status": "over"}',
        b'{"say": "failed", "episode": 1, "fault": "' + b"x" * 10_001 + b'"}',
    ],
)
def test_what_is_none_is_named(data):
    with pytest.raises(BadMessage, match="wrote what is no message"):
        read_from_child(data)


def test_a_message_that_is_too_long_is_refused_before_it_has_come():
    frames = Frames(10)
    with pytest.raises(BadMessage, match="wrote a message of 11 bytes, more than 10"):
        list(frames.feed(b"\0\0\0\x0b"))


@pytest.mark.parametrize("content", ["\ud800", float("nan"), b"bytes", {1, 2}])
def test_what_is_no_json_is_an_error_of_who_says_it(content):
    asked = TurnAsked.model_construct(episode=1, messages=[{"content": content}])
    with pytest.raises((TypeError, ValueError)):
        to_host(asked)


def test_errors_come_over_with_their_kind():
    class Own(ConfigError):
        pass

    error = ErrorTold.of(Own("wrong", where="here", hint="do")).error()
    assert (type(error), error.message, error.where, error.hint) == (ConfigError, "wrong", "here", "do")
    assert type(ErrorTold(kind="first_line", message="").error()) is RlhfError
    again = [error_as_told(told_error(each)) for each in (EpisodeTruncated("no turn"), KeyError("k"), error)]
    assert [(type(each).__name__, str(each)) for each in again[:2]] == [
        ("EpisodeTruncated", "no turn"),
        ("KeyError", "'k'"),
    ]
    assert isinstance(again[0], EpisodeTruncated) and again[2] is error


def test_what_the_process_is_told_is_a_tuple():
    (frame,) = Frames(None).feed(to_child("answer", 1, 2))
    assert pickle.loads(frame) == ("answer", 1, 2)
