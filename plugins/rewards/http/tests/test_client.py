"""The reward `http` against servers that work, are busy, or talk nonsense."""

import asyncio
import json
import logging
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from http_rewards import make_rollout, number, serving
from pydantic import ValidationError
from running import PATIENCE_SECONDS

from rlhf_core.components import RewardContext
from rlhf_core.config.resolve import resolve_reward
from rlhf_core.config.sections import RewardCallOptions
from rlhf_core.errors import ConfigError, RewardError, UserInputError
from rlhf_core.plugins.selected import load
from rlhf_core.rewards.scorer import RewardScorer, make_reward_spec
from rlhf_reward_http.client import HttpReward, build
from rlhf_reward_http.config import HttpRewardConfig
from rlhf_web import RemoteError

CONTEXT = RewardContext(device="cpu", seed=0)


def ask(url, rollouts, *, token=None, **options):
    async def run():
        reward = HttpReward(HttpRewardConfig(url=url, **options), token)
        try:
            return await reward(rollouts)
        finally:
            await reward.aclose()

    return asyncio.run(run())


@contextmanager
def answering(*answers):
    """A server that gives (status, headers, body) in turn, the last for ever; yields its URL and what it was sent."""
    seen = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            status, headers, answer = answers[min(len(seen), len(answers) - 1)]
            seen.append((dict(self.headers), body))
            if status == 0:  # hang up
                self.close_connection = True
                return
            self.send_response(status)
            for name, value in {"Content-Length": str(len(answer)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/score", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join(PATIENCE_SECONDS)


def scores(*values):
    return 200, {}, json.dumps({"protocol": 1, "scores": values}).encode()


def test_scores_come_back_in_order_over_connections_that_are_used_again():
    rollouts = [make_rollout(i) for i in range(37)]
    with serving(number) as server:
        assert ask(server.url, rollouts, samples_per_request=2, max_connections=3) == [float(i) for i in range(37)]
        assert server.requests == 19
        assert server.most_at_once <= 3
        assert ask(server.url, []) == []


def test_connections_are_kept_between_calls():
    with serving(number, max_connections=1) as server:

        async def run():
            reward = HttpReward(HttpRewardConfig(url=server.url), None)
            for _ in range(5):
                await reward([make_rollout(1)])
            await reward.aclose()

        asyncio.run(run())
        assert server.requests == 5


@pytest.mark.parametrize(
    "first", [(503, {"Retry-After": "0"}, b""), (429, {}, b""), (502, {}, b"bad gateway"), (0, {}, b"")], ids=str
)
def test_a_busy_or_broken_server_is_asked_again(first):
    with answering(first, first, scores(4.0)) as (url, seen):
        assert ask(url, [make_rollout(4)]) == [4.0]
    assert len(seen) == 3


def test_patience_ends_with_what_was_last_heard():
    with (
        answering((503, {}, b'{"error":"reloading"}')) as (url, seen),
        pytest.raises(RemoteError, match=r"score: status 503: reloading \(gave up after \d+ attempts in 0\.3 s\)"),
    ):
        ask(url, [make_rollout(0)], patience_seconds=0.3)
    assert len(seen) > 1
    with pytest.raises(RemoteError, match=r"ConnectError.*gave up after 1 attempts"):
        ask(url, [make_rollout(0)], patience_seconds=0)


def test_a_silent_server_is_left():
    never = threading.Event()
    with serving(lambda rollouts: never.wait(5) and [0.0]) as server:
        with pytest.raises(RemoteError, match="ReadTimeout"):
            ask(server.url, [make_rollout(0)], answer_seconds=0.1, patience_seconds=0.2)
        never.set()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((500, {}, b'{"error":"the judge is ill"}'), "status 500: the judge is ill"),
        ((307, {"Location": "http://elsewhere.invalid/"}, b""), "status 307"),
        ((200, {}, b"<html>"), "its response is not valid: not JSON"),
        ((200, {}, b'{"protocol":9,"scores":[1]}'), "protocol: Input should be 1"),
        (scores(1.0, 2.0), "2 scores for 1 samples"),
        ((200, {}, b" " * 5000), "longer than 4,096 bytes"),
        ((200, {"Content-Encoding": "gzip"}, b"\x1f\x8b"), "compressed, which the request did not accept"),
    ],
)
def test_any_other_answer_is_an_error_at_once_that_hides_what_may_be_secret(answer, said):
    with answering(answer) as (url, seen), pytest.raises(RemoteError, match=said) as caught:
        ask(url + "?key=s3cret", [make_rollout(0)], max_response_bytes=4096)
    assert len(seen) == 1
    assert str(caught.value).startswith(url)
    assert "s3cret" not in str(caught.value)


def test_the_token_is_sent_and_nowhere_shown(monkeypatch, caplog):
    monkeypatch.setenv("SCORER_TOKEN", "t0ken")
    config = HttpRewardConfig(url="http://127.0.0.1:1/score", token_env="SCORER_TOKEN")
    assert "t0ken" not in repr(config)
    echo = (500, {}, b'{"error":"you sent Bearer t0ken"}')
    with caplog.at_level(logging.DEBUG), answering(echo) as (url, seen):
        reward = build(config.model_copy(update={"url": url}), CONTEXT)

        async def run():
            try:
                await reward([make_rollout(0)])
            finally:
                await reward.aclose()

        with pytest.raises(RemoteError) as caught:
            asyncio.run(run())
    assert seen[0][0]["Authorization"] == "Bearer t0ken"
    assert "t0ken" not in str(caught.value) + caplog.text
    monkeypatch.delenv("SCORER_TOKEN")
    with pytest.raises(UserInputError, match="SCORER_TOKEN is not set"):
        build(config, CONTEXT)


@pytest.mark.parametrize(
    "url", ["ftp://host/x", "file:///etc/passwd", "host:80/x", "http://", "http://host:99999/", "http://u:s3cret@host/"]
)
def test_only_plain_http_addresses(url):
    with pytest.raises(ValidationError) as caught:
        HttpRewardConfig(url=url)
    assert "s3cret" not in str(caught.value)


def test_a_run_file_with_credentials_is_refused_without_repeating_them():
    with pytest.raises(ConfigError, match=r"http\.url: contains credentials.*token_env") as caught:
        resolve_reward({"name": "http", "url": "http://me:s3cret@host/"}, "run.yaml")
    assert "s3cret" not in str(caught.value)


def test_core_judges_what_the_server_said_and_closes_the_connections():
    selected = load("rewards", "http")
    with answering(scores("good", 1.0), scores(0.5, None)) as (url, _):
        config = selected.component.config.model_validate({"url": url})
        for policy, expected in [(RewardCallOptions(on_failure="zero"), [0.0, 1.0]), (RewardCallOptions(), None)]:
            scorer = RewardScorer([make_reward_spec(selected, config, CONTEXT, policy)])
            try:
                if expected is None:
                    with pytest.raises(RewardError, match="None is not a number, at sample 1"):
                        scorer.score([make_rollout(0), make_rollout(1)])
                else:
                    found = scorer.score([make_rollout(0), make_rollout(1)])
                    assert [each["http"] for each in found] == expected
            finally:
                scorer.close()
