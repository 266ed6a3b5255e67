"""The reward `http`: samples to a server, scores back, through its restarts and busy times."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx

from rlhf_core.components import RewardContext
from rlhf_core.distributed import is_loopback
from rlhf_core.protocols import Reward
from rlhf_core.types import Rollout
from rlhf_core.util import environment_key

from .config import HttpRewardConfig
from .protocol import CONTENT_TYPE, ProtocolError, decode_response, encode_request, error_text

_AGAIN = frozenset({429, 502, 503, 504})
"""Statuses of a server, or of what stands before it, that is busy or away."""
_FIRST_WAIT_SECONDS = 0.1
_LONGEST_WAIT_SECONDS = 5.0


class RemoteScorerError(Exception):
    """The server gave no scores; names its address without secrets."""


class _TryAgain(Exception):
    """This request may do better later."""

    def __init__(self, reason: str, wait_seconds: float | None = None) -> None:
        super().__init__(reason)
        self.wait_seconds = wait_seconds


def build(config: HttpRewardConfig, context: RewardContext) -> Reward:
    """Raises `UserInputError` where the token's variable is not set."""
    token = None
    if config.token_env is not None:
        hint = f"export {config.token_env}=…, in the shell that starts the run"
        token = environment_key(config.token_env, where='reward "http": token_env', hint=hint)
    return HttpReward(config, token)


class HttpReward:
    """An async reward that keeps its connections between calls."""

    def __init__(self, config: HttpRewardConfig, token: str | None) -> None:
        self._config = config
        self._token = token
        self._shown = shown_url(config.url)
        self._random = random.Random()  # for waits only: no score depends on it
        self._client: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._places = asyncio.Semaphore(config.max_connections)

    async def __call__(self, rollouts: Sequence[Rollout]) -> list[Any]:
        """The scores the server gives. Raises `RemoteScorerError`, or `ProtocolError` on what cannot be sent."""
        size = self._config.samples_per_request
        parts = [rollouts[start : start + size] for start in range(0, len(rollouts), size)]
        client = self._open()
        tasks = [asyncio.ensure_future(self._score(client, part)) for part in parts]
        try:
            answers = await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # one that failed leaves the others asking for nobody
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [score for answer in answers for score in answer]

    async def aclose(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        if client is not None and self._loop is asyncio.get_running_loop():
            await client.aclose()

    def _open(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:  # core gives a new loop after one was blocked
            config = self._config
            self._loop = loop
            self._places = asyncio.Semaphore(config.max_connections)
            self._client = httpx.AsyncClient(
                headers=self._headers(),
                timeout=httpx.Timeout(config.answer_seconds, connect=config.connect_seconds),
                limits=httpx.Limits(
                    max_connections=config.max_connections, max_keepalive_connections=config.max_connections
                ),
                trust_env=not is_loopback(urlsplit(config.url).hostname),  # a proxy has no way to this machine
            )
        return self._client

    def _headers(self) -> dict[str, str]:
        authorization = {} if self._token is None else {"Authorization": f"Bearer {self._token}"}
        asked = {"Accept": CONTENT_TYPE, "Accept-Encoding": "identity"}
        return {"Content-Type": CONTENT_TYPE, **asked, **authorization}

    def _said(self, response: httpx.Response, content: bytes) -> str:
        """The message of an error response, without the key: some servers repeat the headers they were sent."""
        text = f"status {response.status_code}: {error_text(content)}"
        return text if self._token is None else text.replace(self._token, "[hidden]")

    async def _score(self, client: httpx.AsyncClient, rollouts: Sequence[Rollout]) -> list[Any]:
        """One request, sent again while that may help."""
        async with self._places:
            body = encode_request(rollouts)
            deadline = time.monotonic() + self._config.patience_seconds
            attempts = 0
            while True:
                attempts += 1
                try:
                    return await self._ask(client, body, len(rollouts))
                except _TryAgain as failure:
                    wait = min(_FIRST_WAIT_SECONDS * 2 ** min(attempts - 1, 10), _LONGEST_WAIT_SECONDS)
                    wait = max(wait * self._random.uniform(0.5, 1.0), failure.wait_seconds or 0.0)
                    if time.monotonic() + wait > deadline:
                        raise RemoteScorerError(
                            f"{self._shown}: {failure}; gave up after {attempts} attempts in "
                            f"{self._config.patience_seconds:g} s"
                        ) from None
                await asyncio.sleep(wait)

    async def _ask(self, client: httpx.AsyncClient, body: bytes, count: int) -> list[Any]:
        try:
            async with client.stream("POST", self._config.url, content=body) as response:
                content = await self._read(response)
        except httpx.TransportError as error:
            raise _TryAgain(_transport_text(error)) from None
        if response.status_code in _AGAIN:
            raise _TryAgain(self._said(response, content), retry_after(response.headers.get("Retry-After")))
        if response.status_code != 200:
            raise RemoteScorerError(f"{self._shown}: {self._said(response, content)}")
        try:
            return decode_response(content, count)
        except ProtocolError as error:
            raise RemoteScorerError(f"{self._shown}: its response is none: {error}") from None

    async def _read(self, response: httpx.Response) -> bytes:
        """The body, within bounds. A compressed one is refused: a few bytes can stand for gigabytes."""
        if response.headers.get("Content-Encoding", "identity").strip().lower() not in ("", "identity"):
            raise RemoteScorerError(f"{self._shown}: its response is compressed, which was not requested")
        content = bytearray()
        async for chunk in response.aiter_raw():
            content += chunk
            if len(content) > self._config.max_response_bytes:
                raise RemoteScorerError(
                    f"{self._shown}: its response is longer than {self._config.max_response_bytes:,} bytes"
                )
        return bytes(content)


def _transport_text(error: httpx.TransportError) -> str:
    reason = str(error).strip()
    return f"{type(error).__name__}: {reason}" if reason else type(error).__name__


def retry_after(header: str | None) -> float | None:
    """Seconds that a `Retry-After` asks for; None for a date or nonsense, which backing off answers as well."""
    return min(float(header), 60.0) if header is not None and header.isascii() and header.isdigit() else None


def shown_url(url: str) -> str:
    """The address without query and fragment, which may hold a key."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}{parts.path}"
