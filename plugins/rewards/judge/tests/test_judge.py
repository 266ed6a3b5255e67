"""The reward against a server: scores, cache, budget, failures; its key; a local judge; a whole run."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rlhf_core import train
from rlhf_core.components import RewardContext
from rlhf_core.errors import UserInputError
from rlhf_core.plugins.selected import load
from rlhf_reward_judge.remote import JudgeError
from rlhf_testing.rollouts import make_rollout
from rlhf_testing.runs import tiny_run

FAST = {"patience_seconds": 0}


def make(server: Any, folder: Path | None = None, **options: Any) -> Any:
    selected = load("rewards", "judge")
    where = {} if "model_path" in options else {"url": server.url, "model": "wise"}
    config = selected.component.config.model_validate({"rubric": "be right", **where, **options})
    return selected.build(config, RewardContext(device="cpu", seed=0, folder=folder))


def score(reward: Any, *texts: str, close: bool = True) -> list[float]:
    rollouts = [replace(make_rollout(text, sample_id=k), group_id=0) for k, text in enumerate(texts)]

    async def call() -> list[float]:
        try:
            return list(await reward(rollouts))
        finally:
            if close:
                await reward.aclose()

    return asyncio.run(call())


def answer_of(body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(body["messages"][1]["content"])
    return found


def test_points_of_each_answer(server: Any) -> None:
    server.replies = lambda body: json.dumps({"points": len(answer_of(body)["answer"])})
    reward = make(server, max_points=5, temperature=0.2)
    assert score(reward, "a", "abc", "abcde", "a") == [0.2, 0.6, 1.0, 0.2]
    assert len(server.requests) == 3, "equal questions are asked once"
    assert server.requests[0]["path"] == "/v1/chat/completions" and server.requests[0]["model"] == "wise"
    assert reward.take_counts() == {"asked": 3.0, "tokens": 30.0} and reward.take_counts() == {}


def test_pairwise_within_a_group(server: Any) -> None:
    def longer(body: dict[str, Any]) -> str:
        pair = answer_of(body)
        sizes = len(pair["first"]), len(pair["second"])
        return json.dumps({"better": "tie" if sizes[0] == sizes[1] else "first" if sizes[0] > sizes[1] else "second"})

    server.replies = longer
    assert score(make(server, mode="pairwise"), "aaa", "b", "cc", "dd") == [1.0, 0.0, 0.5, 0.5]
    assert score(make(server, mode="pairwise"), "alone") == [0.5]


def test_replies_are_kept_in_the_run_folder(server: Any, tmp_path: Path) -> None:
    assert score(make(server, tmp_path), "a", "b") == [0.5, 0.5]
    again = make(server, tmp_path)
    assert score(again, "b", "c", "a") == [0.5, 0.5, 0.5]
    assert len(server.requests) == 3 and again.take_counts() == {"remembered": 2.0, "asked": 1.0, "tokens": 10.0}
    assert score(make(server, tmp_path, rubric="be short"), "a") == [0.5]
    assert len(server.requests) == 4, "another rubric is another question"


def test_the_budget_holds_over_processes_and_resumes(server: Any, tmp_path: Path) -> None:
    assert score(make(server, tmp_path, max_calls=3), "a", "b") == [0.5, 0.5]
    with pytest.raises(JudgeError, match="budget of the run is spent: 2 of max_calls 3 are made, 2 more needed"):
        score(make(server, tmp_path, max_calls=3), "c", "d")
    assert score(make(server, tmp_path, max_calls=3), "a", "c") == [0.5, 0.5], "what is known costs nothing"
    with pytest.raises(JudgeError, match="30 tokens are spent, max_tokens is 30"):
        score(make(server, tmp_path, max_tokens=30), "e")
    assert len(server.requests) == 3


@pytest.mark.parametrize("mode", ["rubric", "pairwise"])
def test_a_verdict_that_cannot_be_read(server: Any, mode: str) -> None:
    server.replies = lambda body: "It is fine."
    with pytest.raises(JudgeError, match="its verdict cannot be read: the reply does not end with a JSON object"):
        score(make(server, mode=mode), "a", "b")
    lenient = make(server, mode=mode, unreadable="lowest", asked_again=2)
    assert score(lenient, "a", "b") == ([0.0, 0.0] if mode == "rubric" else [0.5, 0.5])
    asked = 6.0 if mode == "rubric" else 3.0
    assert lenient.take_counts() == {"asked": asked, "tokens": 10 * asked, "unreadable": asked}


def test_it_is_asked_again_for_a_verdict(server: Any) -> None:
    replies = iter(["well", '{"points": 10}'])
    server.replies = lambda body: next(replies)
    assert score(make(server), "a") == [1.0]


def test_a_busy_server_is_asked_again(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    replies: Any = iter([(503, {}, b"busy"), (429, {"Retry-After": "0"}, b""), '{"points": 10}'])
    server.replies = lambda body: next(replies)
    monkeypatch.setattr("rlhf_web.chat._FIRST_WAIT_SECONDS", 0.01)
    assert score(make(server), "a") == [1.0]
    server.replies = lambda body: (503, {}, b"")
    with pytest.raises(JudgeError, match=r"status 503 \(gave up after \d+ attempts in 0\.1 s\)"):
        score(make(server, patience_seconds=0.1), "a")


def test_a_server_that_is_busy_for_a_moment_is_waited_for(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    replies: Any = iter([(429, {}, b"")] * 4 + ['{"points": 10}'] * 4)
    lock = threading.Lock()

    def reply(body: Any) -> Any:
        with lock:
            return next(replies)

    server.replies = reply
    monkeypatch.setattr("rlhf_web.chat._FIRST_WAIT_SECONDS", 0.01)
    assert score(make(server, max_connections=4), *"abcd") == [1.0] * 4


def test_an_answer_that_is_no_unicode_is_judged(server: Any) -> None:
    assert score(make(server), "\ud800") == [0.5]


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ((401, {}, b"who are you, Bearer s3cr3t-value?"), r"status 401: who are you, Bearer \[hidden\]\?"),
        ((302, {"Location": "http://127.0.0.1:1/"}, b""), "status 302"),
        ((200, {}, b"<html>"), "not a chat completion: it is not valid JSON"),
        ((200, {}, b'{"choices": []}'), "not a chat completion: list index out of range"),
        ((200, {}, b'{"choices": [{"message": {"content": [1]}}]}'), "the content is a list"),
        ((200, {}, b"\xff"), "not a chat completion"),
        ((200, {"Content-Encoding": "gzip"}, b"x"), "compressed, which the request did not accept"),
        ((200, {}, b" " * (1 << 20) + b"  "), "longer than 1,048,576 bytes"),
    ],
)
def test_answers_of_a_server_that_are_none(
    server: Any, monkeypatch: pytest.MonkeyPatch, reply: Any, message: str
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "s3cr3t-value")
    server.replies = lambda body: reply
    with pytest.raises(JudgeError, match=message) as error:
        score(make(server, key_env="JUDGE_KEY"), "a")
    assert "s3cr3t-value" not in str(error.value)
    assert server.headers[0]["Authorization"] == "Bearer s3cr3t-value" and len(server.requests) == 1


def test_tokens_are_estimated_where_the_server_does_not_say(server: Any) -> None:
    message = json.dumps({"choices": [{"message": {"content": '{"points": 1}'}}], "usage": {"total_tokens": True}})
    server.replies = lambda body: (200, {}, message.encode())
    reward = make(server)
    score(reward, "a")
    sent = sum(len(each["content"]) for each in server.requests[0]["messages"])
    assert reward.take_counts()["tokens"] >= sent // 4


def test_a_key_that_is_not_set(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(UserInputError, match="environment variable JUDGE_KEY is not set"):
        make(server, key_env="JUDGE_KEY")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "set exactly one of them: url"),
        ({"url": "http://h/v1", "model": "m", "model_path": "x"}, "exactly one of them"),
        ({"url": "http://h/v1"}, "model is required with url"),
        ({"url": "ftp://h/v1", "model": "m"}, "should be http://HOST"),
        ({"url": "http://me:word@h/v1", "model": "m"}, "name a variable in key_env"),
        ({"url": "http://h/v1?key=abc", "model": "m"}, "name a variable in key_env"),
        ({"model_path": "x", "key_env": "K"}, "are for a server"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message) as error:
        load("rewards", "judge").component.config.model_validate({"rubric": "be right", **options})
    assert "word" not in str(error.value)


def test_a_local_judge_answers_by_an_engine() -> None:
    """A model that cannot judge: what it writes is no verdict, and each call costs its tokens."""
    options = {"model_path": "builtin:tiny-digits", "engine_options": {"max_batch_size": 2}, "max_reply_tokens": 8}
    reward = make(None, **options, unreadable="lowest", asked_again=0)
    assert score(reward, "1", "2", "3") == [0.0, 0.0, 0.0]
    counts = reward.take_counts()
    assert counts["asked"] == counts["unreadable"] == 3 and counts["tokens"] > 3
    with pytest.raises(UserInputError, match='reward "judge": model_path: there is no folder|cannot load'):
        make(None, model_path="./no-such-model")


@pytest.mark.slow
def test_a_run_is_judged(server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "s3cr3t-value")
    entry = {"name": "judge", "rubric": "be right", "url": server.url, "model": "wise", "key_env": "JUDGE_KEY"}
    server.replies = lambda body: json.dumps({"points": len(answer_of(body)["answer"]) % 3})
    result = train(tiny_run({"rewards": [{**entry, "max_calls": 100}]}), output=tmp_path / "run")
    assert result is not None
    last = result.metrics[-1]
    assert last["reward_calls/judge/asked"] > 0 and last["reward_calls/judge/tokens"] > 0
    assert list((tmp_path / "run" / "reward-cache").glob("judge-*.sqlite"))
    for path in (tmp_path / "run").rglob("*"):
        assert not path.is_file() or b"s3cr3t-value" not in path.read_bytes(), path
