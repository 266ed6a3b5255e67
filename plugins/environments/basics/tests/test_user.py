"""A simulated user: both sides of the conversation, its end, the two kinds of models, and errors."""

from __future__ import annotations

import asyncio
import copy
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from rlhf_core import train
from rlhf_core.errors import DataError
from rlhf_core.prompts import PromptEncoder
from rlhf_environments.config import UserConfig
from rlhf_environments.user import User, build
from rlhf_environments.user_models import RemoteUser, Said, instructions_role
from rlhf_testing.contracts import EnvironmentContract
from rlhf_testing.models import tiny_tokenizer
from rlhf_testing.runs import tiny_run

LOCAL: dict[str, Any] = {"model_path": "builtin:tiny-digits", "device": "cpu", "max_message_tokens": 4}


class Scripted:
    """A user that says given texts, and remembers what it was given."""

    def __init__(self, *texts: str) -> None:
        self.texts, self.calls = list(texts), []

    def say(self, messages: Any, *, seed: int, offset: int) -> Said:
        self.calls.append(([dict(each) for each in messages], seed, offset))
        return Said(self.texts.pop(0), 3)

    def close(self) -> None: ...


def task(text: str = "", messages: Any = None, **metadata: Any) -> Any:
    prompt = SimpleNamespace(text=text, messages=messages, metadata={"goal": "a refund", **metadata}, position=4)
    return SimpleNamespace(prompt=prompt, seed=11, sample_seed=12)


def reply(text: str) -> Any:
    return SimpleNamespace(text=text)


def user(model: Any, **options: Any) -> User:
    return User(UserConfig(url="http://localhost:1/v1", model="m", **options), model)


def test_both_sides_of_a_conversation_that_the_user_opens_and_ends() -> None:
    model = Scripted("Hello, my shoes broke.", "I want a refund.", "Thank you! [END]")
    game = user(model)
    assert game.reset(task(persona="You are impatient.")) == "Hello, my shoes broke."
    assert game.step(reply("How can I help?")) == ("I want a refund.", 0.0, False)
    assert game.metrics == {"ended_by_user": 0.0}
    assert game.step(reply("Granted.")) == (None, 0.0, True)
    assert game.metrics == {"ended_by_user": 1.0}
    system, *others = model.calls[-1][0]
    assert system["role"] == "system" and "impatient" in system["content"] and "a refund" in system["content"]
    assert "[END]" in system["content"]
    assert others == [
        {"role": "assistant", "content": "Hello, my shoes broke."},
        {"role": "user", "content": "How can I help?"},
        {"role": "assistant", "content": "I want a refund."},
        {"role": "user", "content": "Granted."},
    ]
    # All samples of a prompt get the same opening. Later noise is that of the sample, and never repeats.
    assert [(seed, offset) for _, seed, offset in model.calls] == [(11, 0), (12, 3), (12, 6)]


@pytest.mark.parametrize(
    ("prompt", "seen"),
    [
        ({"text": "My shoes broke."}, [("assistant", "My shoes broke.")]),
        (
            {
                "text": "rendered",
                "messages": [
                    {"role": "system", "content": "You are a shop."},
                    {"role": "user", "content": "Hi."},
                    {"role": "assistant", "content": "Hello."},
                    {"role": "user", "content": "My shoes broke."},
                ],
            },
            [("assistant", "Hi."), ("user", "Hello."), ("assistant", "My shoes broke.")],
        ),
    ],
)
def test_a_prompt_is_what_the_user_said_first(prompt: Any, seen: Any) -> None:
    model = Scripted("And now?")
    game = user(model)
    assert game.reset(task(**prompt)) is None and not model.calls
    game.step(reply("Yes?"))
    assert [(each["role"], each["content"]) for each in model.calls[0][0][1:]] == [*seen, ("user", "Yes?")]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"goal": None}, "'goal' of prompt 4 is None.*goal_key"),
        ({"persona": 3}, "'persona' of prompt 4 is 3.*persona_key"),
    ],
)
def test_a_record_without_a_goal_is_named(metadata: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        user(Scripted()).reset(task(**metadata))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "exactly one of them"),
        ({"url": "http://localhost:1", "model_path": "there"}, "exactly one of them"),
        ({"url": "http://localhost:1"}, "model is required"),
        ({"model_path": "there", "model": "m"}, "for a server"),
        ({"url": "http://localhost:1?key=3", "model": "m"}, "query"),
        ({"model_path": "there", "instructions": "{mood} {end}"}, "{mood}"),
        ({"model_path": "there", "instructions": "{goal}"}, "needs {end}"),
        ({"model_path": "there", "instructions": "{ {end}"}, "not a template"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        UserConfig(**options)


def answering(*answers: Any) -> tuple[ThreadingHTTPServer, list[Any]]:
    """A server that gives these answers: texts, or whole bodies."""
    received: list[Any] = []
    given = iter(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append((self.path, self.headers.get("Authorization"), json.loads(body)))
            answer = next(given)
            message = {"choices": [{"message": {"content": answer}}]} if isinstance(answer, str) else answer
            content = json.dumps(message).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    return server, received


def test_a_user_on_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER_KEY", "secret-key")
    server, received = answering("Hello.", {"choices": []})
    try:
        config = UserConfig(
            url=f"http://127.0.0.1:{server.server_port}/v1", model="m", key_env="USER_KEY", temperature=0.5
        )
        with closing(build(config, SimpleNamespace(seed=0))) as users:
            game = users.new_episode()
            assert game.reset(task()) == "Hello."
            with pytest.raises(ValueError, match=r"127\.0\.0\.1.*is not a chat completion") as error:
                game.step(reply("Hi."))
        assert "secret-key" not in str(error.value)
    finally:
        server.shutdown()
        server.server_close()
    path, key, request = received[0]
    assert path == "/v1/chat/completions" and key == "Bearer secret-key"
    assert request["model"] == "m" and request["temperature"] == 0.5 and request["messages"][0]["role"] == "system"
    assert request["seed"] != received[1][2]["seed"], "each message has its own seed"


def test_requests_to_a_server_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all conversations, which are on threads."""
    server, received = answering(*["Hello."] * 4)
    config = UserConfig(url=f"http://127.0.0.1:{server.server_port}/v1", model="m", max_connections=2)
    lock, at_once = threading.Lock(), [0, 0]
    post = RemoteUser._post

    async def counted(self: RemoteUser, body: bytes) -> str:
        with lock:
            at_once[0] += 1
            at_once[1] = max(at_once)
        try:
            await asyncio.sleep(0.05)
            return await post(self, body)
        finally:
            with lock:
                at_once[0] -= 1

    monkeypatch.setattr(RemoteUser, "_post", counted)
    try:
        with closing(build(config, SimpleNamespace(seed=0))) as users, ThreadPoolExecutor(4) as threads:
            texts = list(threads.map(lambda _: users.new_episode().reset(task()), range(4)))
    finally:
        server.shutdown()
        server.server_close()
    assert texts == ["Hello."] * 4 and len(received) == 4 and at_once[1] <= 2


def test_a_request_without_a_free_connection_ends_by_name() -> None:
    config = UserConfig(
        url="http://127.0.0.1:1/v1", model="m", max_connections=1, answer_seconds=0.01, patience_seconds=0
    )
    model = RemoteUser(config)
    model._places.acquire()
    with pytest.raises(TimeoutError, match=r"environment\.max_connections"):
        model.say([{"role": "user", "content": "Hi."}], seed=0, offset=0)


def test_a_local_user_is_deterministic_by_seed() -> None:
    def conversation(users: Any, seed: int) -> list[str]:
        game = users.new_episode()
        start = task()
        start.seed = start.sample_seed = seed
        return [str(game.reset(start)), *(str(game.step(reply(f"{turn}>"))[0]) for turn in range(3))]

    config = UserConfig(**LOCAL, temperature=1.0)
    with closing(build(config, SimpleNamespace(seed=0))) as users:
        first, other = conversation(users, 1), conversation(users, 2)
        found: dict[int, list[str]] = {}
        threads = [
            threading.Thread(target=lambda seed=seed: found.update({seed: conversation(users, seed)}))
            for seed in (1, 2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert found == {1: first, 2: other}, "conversations at the same time do not change each other"
    assert first != other
    with closing(build(config, SimpleNamespace(seed=0))) as users:
        assert conversation(users, 1) == first


def test_the_policy_cannot_write_special_tokens_for_a_local_user() -> None:
    config = UserConfig(**LOCAL)
    with closing(build(config, SimpleNamespace(seed=0))) as users:
        token = users._model._tokenizer.eos_token
        asked: list[Any] = []
        ask = users._model._thread.ask
        users._model._thread.ask = lambda requests, sampling: asked.extend(requests) or ask(requests, sampling)
        for text in ("13", f"1{token}3", f"13{token[:2]}{token}{token[2:]}"):
            game = users.new_episode()
            game.reset(task("31>"))
            game.step(reply(text))
        assert len({request.prompt_ids for request in asked}) == 1


@pytest.mark.parametrize(
    ("refuses", "role"), [("false", "system"), ("messages[0].role == 'system'", "user"), ("true", None)]
)
def test_instructions_have_a_role_that_the_template_accepts(refuses: str, role: str | None) -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = (
        f"{{% if {refuses} %}}{{{{ raise_exception('no such role') }}}}{{% endif %}}"
        "{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    encoder = PromptEncoder(tokenizer)
    if role is None:
        with pytest.raises(DataError, match="no such role"):
            instructions_role(encoder)
    else:
        assert instructions_role(encoder) == role


def test_the_samples_of_a_prompt_share_one_opening() -> None:
    config = UserConfig(**LOCAL, temperature=1.0)
    with closing(build(config, SimpleNamespace(seed=0))) as users:
        asked: list[Any] = []
        ask = users._model._thread.ask
        users._model._thread.ask = lambda requests, sampling: asked.append(requests) or ask(requests, sampling)
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(lambda _: users.new_episode().reset(task()), range(4)))
        assert len(set(found)) == 1 and len(asked) == 1
        other = task()
        other.seed = 99
        users.new_episode().reset(other)
        assert len(asked) == 2


class Shared:
    """Stands in for the local model, and counts."""

    opened = closed = 0

    def __init__(self, config: UserConfig, seed: int) -> None:
        Shared.opened += 1

    def say(self, messages: Any, *, seed: int, offset: int) -> Said:
        return Said("go on>" if len(messages) < 6 else "[END]", 2)

    def close(self) -> None:
        Shared.closed += 1


def test_a_run_opens_one_user_for_all_players_and_a_dry_run_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf_environments.user_models.LocalUser", Shared)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(8 * (json.dumps({"prompt": "31>", "goal": "13"}) + "\n"))
    run = tiny_run(
        {
            "environment": {"name": "several", "of": {"user": {"name": "user", **LOCAL}, "games": "guess-number"}},
            "prompts": {"name": "jsonl", "path": str(prompts)},
            "engine": {"max_new_tokens": 4},
            "rewards": None,
            "eval": None,
        }
    )
    assert train(run, dry_run=True) is None and Shared.opened == 0
    run["environment"] = {"name": "user", "max_turns": 4, **LOCAL}
    run["rewards"] = ["length"]
    run["eval"] = {"every_episodes": 1, "num_prompts": 2, "samples_per_prompt": 2}
    assert train(run, dry_run=True) is None and Shared.opened == 0
    result = train(run, output=tmp_path / "run")
    assert result is not None and (Shared.opened, Shared.closed) == (1, 1)
    line = result.metrics[-1]
    assert line["environment/ended_by_user"] == 1.0 and line["environment/num_turns_mean"] == 3.0
    assert line["response/observation_fraction"] > 0 and line["reward/environment"] == 0.0


class TestUserKeepsTheContract(EnvironmentContract):
    plugin = "user"
    options = LOCAL
    records = ({"prompt": "31>", "goal": "13"}, {"prompt": "", "goal": "sorted digits", "persona": "Brief."})
    replies = ("13",)
    chat = False
