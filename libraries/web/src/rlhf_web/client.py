"""A client of one JSON server, with connection reuse, bounded responses and retries."""

from __future__ import annotations

import asyncio
import json
import random
import ssl
import time
from collections.abc import Callable, Collection
from functools import cache
from urllib.parse import urlsplit

import httpx2 as httpx

from rlhf_core.util import printable

from .servers import ClientOptions, is_loopback

_JSON = "application/json"
_SHOWN_CHARS = 500
_MAX_WAIT_SECONDS = 10.0
_MAX_RETRY_AFTER_SECONDS = 60.0


class RemoteError(Exception):
    """The server did not return a usable answer. The message names its address and contains no secrets."""

    def __init__(self, message: str, *, status: int | None = None, is_lost: bool = False) -> None:
        """Create the error.

        Args:
            message: message for people.
            status: HTTP status of the response, or None without a response.
            is_lost: whether all attempts failed because the server was unreachable, lost the request, or responded
                that it is temporarily unavailable.
        """
        super().__init__(message)
        self.status = status
        self.is_lost = is_lost


@cache
def tls_context(trust_env: bool) -> ssl.SSLContext:
    """Return the context that verifies certificates, one for all clients: reading the trusted ones takes a while.

    Args:
        trust_env: Whether SSL_CERT_FILE and SSL_CERT_DIR, at the first call, replace the system's certificates.
    """
    return httpx.create_ssl_context(trust_env=trust_env)


class _TryAgain(Exception):
    """The request failed but may succeed later."""

    def __init__(self, reason: str, wait_seconds: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_seconds = wait_seconds


class JsonClient:
    """Exchanges JSON with one server.

    Example:
        limits = {"max_response_bytes": 2**20, "first_wait_seconds": 0.5}
        client = JsonClient("http://judge:8000/score", ClientOptions(), key=None, again=[503], **limits)
        try:
            body = await client.post(lambda: json.dumps(request).encode())
        finally:
            await client.aclose()
    """

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
        """Create the client. Connections are opened by `post`.

        Args:
            url: address of the server.
            options: numbers of connections and timeouts.
            key: sent as `Authorization: Bearer`, and removed from every message. None sends none.
            max_response_bytes: maximum size of a response body.
            again: HTTP statuses of a server or proxy that is temporarily busy or unavailable. A request is sent again
                after such a response, as after a failed connection.
            first_wait_seconds: maximum wait before the second attempt. It doubles with each further attempt, up to
                ten seconds.
        """
        parts = urlsplit(url)
        self._url = url
        self.shown = f"{parts.scheme}://{parts.netloc}{parts.path}"  # without the query, which may contain a key
        self._is_local = is_loopback(parts.hostname)
        self._key = key
        self._max_connections = options.max_connections
        self._timeout = httpx.Timeout(options.answer_seconds, connect=options.connect_seconds)
        self._max_response_bytes = max_response_bytes
        self._again = frozenset(again)
        self._first_wait_seconds = first_wait_seconds
        self._patience_seconds = options.patience_seconds
        self._random = random.Random()  # only for waits
        self._client: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._places = asyncio.Semaphore(options.max_connections)

    async def post(
        self, encode: Callable[[], bytes], path: str = "", *, patience_seconds: float | None = None
    ) -> bytes:
        """Post a request and return the body of the response.

        Args:
            encode: returns the body of the request. Called when a connection is free.
            path: appended to the address, with its query.
            patience_seconds: total time for retries, by default that of the options.

        Raises:
            RemoteError: if the response is not usable, or all attempts within `patience_seconds` failed.
        """
        return await self._request("POST", path, encode, patience_seconds)

    async def get(self, path: str = "", *, patience_seconds: float | None = None) -> bytes:
        """Get a path and return the body of the response.

        Args:
            path: appended to the address, with its query.
            patience_seconds: total time for retries, by default that of the options.

        Raises:
            RemoteError: if the response is not usable, or all attempts within `patience_seconds` failed.
        """
        return await self._request("GET", path, None, patience_seconds)

    async def _request(
        self, method: str, path: str, encode: Callable[[], bytes] | None, patience_seconds: float | None
    ) -> bytes:
        patience = self._patience_seconds if patience_seconds is None else patience_seconds
        client = self._open()
        shown = self.shown + path.partition("?")[0]
        async with self._places:
            body = None if encode is None else encode()
            deadline = time.monotonic() + patience
            attempt = 0
            while True:
                attempt += 1
                try:
                    return await self._send(client, method, path, body, shown)
                except _TryAgain as failure:
                    wait = min(self._first_wait_seconds * 2 ** min(attempt - 1, 10), _MAX_WAIT_SECONDS)
                    wait = max(wait * self._random.uniform(0.5, 1.0), failure.wait_seconds)
                    if time.monotonic() + wait > deadline:
                        tries = f"{attempt} attempts in {patience:g} s"
                        raise RemoteError(f"{shown}: {failure} (gave up after {tries})", is_lost=True) from None
                await asyncio.sleep(wait)

    async def aclose(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        if client is not None and self._loop is asyncio.get_running_loop():
            await client.aclose()

    def _open(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:  # core uses a new loop after one was blocked
            limit = self._max_connections
            trust_env = not self._is_local  # a proxy cannot reach this machine's loopback addresses
            self._loop, self._places = loop, asyncio.Semaphore(limit)
            self._client = httpx.AsyncClient(
                headers={
                    "Content-Type": _JSON,
                    "Accept": _JSON,
                    "Accept-Encoding": "identity",
                    **({} if self._key is None else {"Authorization": f"Bearer {self._key}"}),
                },
                timeout=self._timeout,
                limits=httpx.Limits(max_connections=limit, max_keepalive_connections=limit),
                trust_env=trust_env,
                verify=tls_context(trust_env),
            )
        return self._client

    async def _send(self, client: httpx.AsyncClient, method: str, path: str, body: bytes | None, shown: str) -> bytes:
        try:
            async with client.stream(method, self._url + path, content=body) as response:
                content = await self._read(response, shown)
        except httpx.TransportError as error:
            raise _TryAgain(self._hide_key(f"{type(error).__name__}: {error}".rstrip(": "))) from None
        if response.status_code == 200:
            return content
        message = f"status {response.status_code}: {self._hide_key(_error_text(content))}".rstrip(": ")
        if response.status_code in self._again:
            raise _TryAgain(message, _retry_after_seconds(response.headers.get("Retry-After", "")))
        raise RemoteError(f"{shown}: {message}", status=response.status_code)

    async def _read(self, response: httpx.Response, shown: str) -> bytes:
        """Read the body up to the size limit. A compressed body is refused, since a few bytes can become gigabytes."""
        if response.headers.get("Content-Encoding", "identity").strip().lower() not in ("", "identity"):
            raise RemoteError(f"{shown}: its response is compressed, which the request did not accept")
        content = bytearray()
        async for chunk in response.aiter_raw():
            content += chunk
            if len(content) > self._max_response_bytes:
                raise RemoteError(f"{shown}: its response is longer than {self._max_response_bytes:,} bytes")
        return bytes(content)

    def _hide_key(self, text: str) -> str:
        """Replace the key, since some servers repeat the request's headers."""
        return text if self._key is None else text.replace(self._key, "[hidden]")


def _error_text(body: bytes) -> str:
    """The message of an error response, or the start of a body in another format."""
    try:
        error = json.loads(body).get("error")
    except (ValueError, AttributeError, RecursionError):
        error = None
    text = error if isinstance(error, str) else body.decode("utf-8", "replace")
    return printable(" ".join(text.split())[:_SHOWN_CHARS])


def _retry_after_seconds(header: str) -> float:
    """Wait requested by `Retry-After`. 0 for a date or an invalid value, for which the usual backoff suffices."""
    return min(float(header), _MAX_RETRY_AFTER_SECONDS) if header.isascii() and header.isdigit() else 0.0
