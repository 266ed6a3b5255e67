"""A judge behind an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from rlhf_core.distributed import is_loopback
from rlhf_core.util import printable
from rlhf_web import UnreadableJson, environment_key, read_first_json

from .config import JudgeConfig
from .verdicts import Messages

_AGAIN = frozenset({408, 429, 500, 502, 503, 504})
"""Statuses of a server, or of what stands before it, that is busy or away."""
_FIRST_WAIT_SECONDS = 0.5
_LONGEST_WAIT_SECONDS = 30.0
_MOST_BYTES = 1 << 20
_SHOWN_CHARS = 200
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


class _Lost(Exception):
    def __init__(self, reason: str, wait_seconds: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_seconds = wait_seconds


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
        assert config.url is not None
        self._config = config
        self._address = f"{config.url}/chat/completions"
        self._key = None
        if config.key_env is not None:
            hint = f"export {config.key_env}=…, in the shell that starts the run"
            self._key = environment_key(config.key_env, where='reward "judge": key_env', hint=hint)
        self._breaker = Breaker(config.breaker_failures, config.breaker_seconds)
        self._client: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._places = asyncio.Semaphore(config.max_connections)

    async def ask(self, questions: Sequence[Messages]) -> list[Reply | Exception]:
        """A reply to each, or why there is none."""
        self._open()
        found = await asyncio.gather(*(self._ask_patiently(each) for each in questions), return_exceptions=True)
        for each in found:
            if isinstance(each, BaseException) and not isinstance(each, Exception):
                raise each
        return [each for each in found if isinstance(each, Reply | Exception)]

    async def aclose(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        if client is not None and self._loop is asyncio.get_running_loop():
            await client.aclose()

    def _open(self) -> None:
        loop = asyncio.get_running_loop()
        if self._client is not None and self._loop is loop:
            return
        config = self._config
        self._loop, self._places = loop, asyncio.Semaphore(config.max_connections)
        self._client = httpx.AsyncClient(
            headers={
                "Accept-Encoding": "identity",
                **({} if self._key is None else {"Authorization": f"Bearer {self._key}"}),
            },
            timeout=httpx.Timeout(config.answer_seconds, connect=config.connect_seconds),
            limits=httpx.Limits(max_connections=config.max_connections),
            trust_env=not is_loopback(urlsplit(self._address).hostname),  # a proxy has no way to this machine
        )

    async def _ask_patiently(self, messages: Messages) -> Reply:
        async with self._places:
            for attempt in range(self._config.attempts):
                self._breaker.check()
                try:
                    reply = await self._ask_once(messages)
                except _Lost as lost:
                    if attempt + 1 == self._config.attempts:
                        self._breaker.failed()
                        raise JudgeError(f"{self._address}: {lost}, {attempt + 1} times") from None
                    wait = min(_FIRST_WAIT_SECONDS * 2**attempt, _LONGEST_WAIT_SECONDS)
                    await asyncio.sleep(max(wait, lost.wait_seconds))
                    continue
                self._breaker.succeeded()
                return reply
        raise AssertionError("attempts is at least 1")

    async def _ask_once(self, messages: Messages) -> Reply:
        assert self._client is not None
        config = self._config
        body = {
            "model": config.model,
            "messages": messages,
            "temperature": config.temperature,
            "max_tokens": config.max_reply_tokens,
        }
        try:
            async with self._client.stream("POST", self._address, json=body) as response:
                content = await self._read(response)
        except httpx.TransportError as error:
            raise _Lost(self._hidden(f"{type(error).__name__}: {error}")) from None
        if response.status_code in _AGAIN:
            raise _Lost(f"status {response.status_code}", _retry_after(response.headers.get("Retry-After")))
        if response.status_code != 200:
            said = printable(self._hidden(content.decode("utf-8", "replace"))[:_SHOWN_CHARS])
            raise JudgeError(f"{self._address}: status {response.status_code}: {said}")
        return _reply(content, messages, self._address)

    async def _read(self, response: httpx.Response) -> bytes:
        """The body, within bounds; one that is compressed, though that was not asked for, is not read."""
        if response.headers.get("Content-Encoding", "identity").strip().lower() != "identity":
            raise JudgeError(f"{self._address}: its response is compressed, which was not asked for")
        content = bytearray()
        async for chunk in response.aiter_raw():
            content += chunk
            if len(content) > _MOST_BYTES:
                raise JudgeError(f"{self._address}: its response is longer than {_MOST_BYTES:,} bytes")
        return bytes(content)

    def _hidden(self, text: str) -> str:
        """Without the key: some servers repeat the headers they were sent."""
        return text if self._key is None else text.replace(self._key, "[hidden]")


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


def _retry_after(header: Any) -> float:
    return min(float(header), 60.0) if isinstance(header, str) and header.isascii() and header.isdigit() else 0.0
