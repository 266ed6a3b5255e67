"""A client of one server that speaks JSON: connections are kept, responses bounded, requests sent again."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Collection
from urllib.parse import urlsplit

import httpx2 as httpx

from rlhf_core.util import printable

from .servers import ClientOptions, is_loopback

_JSON = "application/json"
_SHOWN_CHARS = 500
_LONGEST_WAIT_SECONDS = 10.0
_LONGEST_ASKED_WAIT_SECONDS = 60.0


class RemoteError(Exception):
    """The server gave no answer that can be used; names its address, and holds no secret."""


class _TryAgain(Exception):
    """This request may do better later."""

    def __init__(self, reason: str, wait_seconds: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_seconds = wait_seconds


class JsonClient:
    """Posts to one address."""

    def __init__(
        self,
        url: str,
        options: ClientOptions,
        *,
        key: str | None,
        max_response_bytes: int,
        again: Collection[int],
        first_wait_seconds: float,
    ) -> None:
        """Open nothing yet.

        Args:
            key: sent as `Authorization: Bearer`, and taken out of every message.
            again: statuses of a server, or of what stands before it, that is busy or away. As after a connection that
                failed, a request is then sent again.
        """
        parts = urlsplit(url)
        self._url = url
        self.shown = f"{parts.scheme}://{parts.netloc}{parts.path}"  # a query may hold a key
        self._is_near = is_loopback(parts.hostname)
        self._key = key
        self._max_connections = options.max_connections
        self._timeout = httpx.Timeout(options.answer_seconds, connect=options.connect_seconds)
        self._max_response_bytes = max_response_bytes
        self._again = frozenset(again)
        self._first_wait_seconds = first_wait_seconds
        self._patience_seconds = options.patience_seconds
        self._random = random.Random()  # for waits only
        self._client: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._places = asyncio.Semaphore(options.max_connections)

    async def post(self, encode: Callable[[], bytes]) -> bytes:
        """The response's body. encode: makes the request's, once there is a connection for it. Raises `RemoteError`."""
        client = self._open()
        async with self._places:
            body = encode()
            deadline = time.monotonic() + self._patience_seconds
            attempt = 0
            while True:
                attempt += 1
                try:
                    return await self._ask(client, body)
                except _TryAgain as failure:
                    wait = min(self._first_wait_seconds * 2 ** min(attempt - 1, 10), _LONGEST_WAIT_SECONDS)
                    wait = max(wait * self._random.uniform(0.5, 1.0), failure.wait_seconds)
                    if time.monotonic() + wait > deadline:
                        within = f"{attempt} attempts in {self._patience_seconds:g} s"
                        raise RemoteError(f"{self.shown}: {failure}; gave up after {within}") from None
                await asyncio.sleep(wait)

    async def aclose(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        if client is not None and self._loop is asyncio.get_running_loop():
            await client.aclose()

    def _open(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:  # core gives a new loop after one was blocked
            most = self._max_connections
            self._loop, self._places = loop, asyncio.Semaphore(most)
            self._client = httpx.AsyncClient(
                headers={
                    "Content-Type": _JSON,
                    "Accept": _JSON,
                    "Accept-Encoding": "identity",
                    **({} if self._key is None else {"Authorization": f"Bearer {self._key}"}),
                },
                timeout=self._timeout,
                limits=httpx.Limits(max_connections=most, max_keepalive_connections=most),
                trust_env=not self._is_near,  # a proxy has no way to this machine
            )
        return self._client

    async def _ask(self, client: httpx.AsyncClient, body: bytes) -> bytes:
        try:
            async with client.stream("POST", self._url, content=body) as response:
                content = await self._read(response)
        except httpx.TransportError as error:
            raise _TryAgain(self._hidden(f"{type(error).__name__}: {error}".rstrip(": "))) from None
        if response.status_code == 200:
            return content
        said = f"status {response.status_code}: {self._hidden(_error_text(content))}".rstrip(": ")
        if response.status_code in self._again:
            raise _TryAgain(said, _seconds_asked_for(response.headers.get("Retry-After", "")))
        raise RemoteError(f"{self.shown}: {said}")

    async def _read(self, response: httpx.Response) -> bytes:
        """The body, within bounds. A compressed one is refused: a few bytes can stand for gigabytes."""
        if response.headers.get("Content-Encoding", "identity").strip().lower() not in ("", "identity"):
            raise RemoteError(f"{self.shown}: its response is compressed, which was not asked for")
        content = bytearray()
        async for chunk in response.aiter_raw():
            content += chunk
            if len(content) > self._max_response_bytes:
                raise RemoteError(f"{self.shown}: its response is longer than {self._max_response_bytes:,} bytes")
        return bytes(content)

    def _hidden(self, text: str) -> str:
        """Without the key: some servers repeat the headers they were sent."""
        return text if self._key is None else text.replace(self._key, "[hidden]")


def _error_text(body: bytes) -> str:
    """The message of an error response, or the start of a body in another format."""
    try:
        said = json.loads(body).get("error")
    except (ValueError, AttributeError, RecursionError):
        said = None
    text = said if isinstance(said, str) else body.decode("utf-8", "replace")
    return printable(" ".join(text.split())[:_SHOWN_CHARS])


def _seconds_asked_for(header: str) -> float:
    """Of `Retry-After`; 0 for a date or nonsense, which backing off answers as well."""
    return min(float(header), _LONGEST_ASKED_WAIT_SECONDS) if header.isascii() and header.isdigit() else 0.0
