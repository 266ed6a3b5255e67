"""A judge behind an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlhf_core.util import printable
from rlhf_web import JsonClient, RemoteError, RemoteLost, UnreadableJson, environment_key, read_first_json

from .config import JudgeConfig
from .verdicts import Messages

_AGAIN = (408, 429, 500, 502, 503, 504)
_FIRST_WAIT_SECONDS = 0.5
_MOST_BYTES = 1 << 20
_CHARS_PER_TOKEN = 3
"""Where a server does not say what a call has cost: rather too much than too little."""


class JudgeError(Exception):
    """The judge gave no reply; holds no secret."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A judge's reply."""

    text: str
    num_tokens: int
    """Tokens of its prompt and of the reply together."""


class CircuitOpen(Exception):
    """The server is not asked at present."""


class Breaker:
    """A circuit breaker, by which a server that loses every call is left alone for a while.

    Closed at first; opens after failures in a row, and lets one call through when its time is over.
    """

    def __init__(self, failures: int, seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = failures
        self._seconds = seconds
        self._clock = clock
        self._in_a_row = 0
        self._open_until: float | None = None

    def check(self) -> None:
        """Before a call. Raises `CircuitOpen`."""
        if self._open_until is None:
            return
        left = self._open_until - self._clock()
        if left > 0:
            raise CircuitOpen(f"{self._in_a_row} calls in a row were lost; it is asked again in {left:.0f} s")
        self._open_until = self._clock() + self._seconds  # the others wait for this call

    def succeeded(self) -> None:
        """After a reply."""
        self._in_a_row, self._open_until = 0, None

    def failed(self) -> None:
        """After a call that was lost for good."""
        self._in_a_row += 1
        if self._in_a_row >= self._most:
            self._open_until = self._clock() + self._seconds


class RemoteJudge:
    """Asks over HTTP, keeping its connections."""

    def __init__(self, config: JudgeConfig) -> None:
        """Raises `UserInputError` where the key's variable is not set."""
        self._config = config
        key = None
        if config.key_env is not None:
            hint = f"export {config.key_env}=…, in the shell that starts the run"
            key = environment_key(config.key_env, where='reward "judge": key_env', hint=hint)
        self._breaker = Breaker(config.breaker_failures, config.breaker_seconds)
        self._client = JsonClient(
            f"{config.url}/chat/completions",
            key=key,
            max_connections=config.max_connections,
            connect_seconds=config.connect_seconds,
            answer_seconds=config.answer_seconds,
            max_response_bytes=_MOST_BYTES,
            again=_AGAIN,
            first_wait_seconds=_FIRST_WAIT_SECONDS,
            attempts=config.attempts,
            before_each=self._breaker.check,
        )

    async def ask(self, questions: Sequence[Messages]) -> list[Reply | Exception]:
        """A reply to each, or why there is none."""
        found = await asyncio.gather(*(self._ask(each) for each in questions), return_exceptions=True)
        for each in found:
            if isinstance(each, BaseException) and not isinstance(each, Exception):
                raise each
        return [each for each in found if isinstance(each, Reply | Exception)]

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _ask(self, messages: Messages) -> Reply:
        config = self._config
        asked = {
            "model": config.model,
            "messages": messages,
            "temperature": config.temperature,
            "max_tokens": config.max_reply_tokens,
        }
        try:
            content = await self._client.post(lambda: json.dumps(asked).encode("ascii"))
        except RemoteError as error:
            if isinstance(error, RemoteLost):
                self._breaker.failed()
            raise JudgeError(str(error)) from None
        self._breaker.succeeded()
        return _reply(content, messages, self._client.shown)


def _reply(content: bytes, messages: Messages, address: str) -> Reply:
    try:
        found, _ = read_first_json(content.decode("utf-8"))
        text = found["choices"][0]["message"]["content"]
        if not isinstance(text, str):
            raise TypeError(f"the content is a {type(text).__name__}")
    except (UnreadableJson, UnicodeDecodeError, KeyError, IndexError, TypeError) as error:
        raise JudgeError(f"{address}: its response is no chat completion: {printable(str(error))}") from None
    usage = found.get("usage")
    said = usage.get("total_tokens") if isinstance(usage, dict) else None
    if isinstance(said, bool) or not isinstance(said, int) or said < 0:
        said = (sum(len(each["content"]) for each in messages) + len(text)) // _CHARS_PER_TOKEN + 1
    return Reply(text, said)
