"""Checks before an application handles a request: key, host name, and the amount of data read at once."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Router
from starlette.types import Message, Receive, Scope, Send

from .servers import Refused, ServerLimits

JSON = "application/json"
_NAME_AND_PORT = re.compile(r"(?:\[(?P<v6>[0-9a-fA-F:.]+)\]|(?P<name>[\w.-]+))(?::\d{1,5})?", re.ASCII)
_logger = logging.getLogger("rlhf.web")


class Guard:
    """An ASGI application of routes that checks each request first.

    Refusals, by these checks or by a route that raises `Refused`, are returned in the form that `refusal` defines.
    """

    def __init__(
        self,
        routes: Sequence[BaseRoute],
        *,
        refusal: Callable[[Request, Refused], Response],
        knows: Callable[[str], bool] | None = None,
        needs_key: Callable[[str], bool] = lambda path: True,
        key_of: Callable[[Headers], str] | None = None,
        host: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Create the application.

        Args:
            routes: routes to serve.
            refusal: returns the response to a refused request. It must not read the request's body.
            knows: whether a key is valid, checked in constant time. None disables the check.
            needs_key: whether a path requires a key.
            key_of: returns the key of a request, by default that of `Authorization: Bearer KEY`.
            host: address that the server listens at. The host name of a request must be this one, a name of this
                machine or an IP address. This defeats DNS rebinding, in which a website points its own name at this
                server. None disables the check.
            headers: added to every response.
        """
        self._routes = Router(routes, redirect_slashes=False)
        self._refusal = refusal
        self._knows = knows
        self._needs_key = needs_key
        self._key_of = key_of or bearer_key
        self._names = None if host is None else {"localhost", host.lower(), *_own_names()}
        self._headers = headers or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request (ASGI)."""
        has_begun = False

        async def send_with_headers(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                MutableHeaders(scope=message).update(self._headers)
            await send(message)

        async def refuse(refused: Refused, headers: Mapping[str, str] | None = None) -> None:
            response = self._refusal(Request(scope), refused)
            response.headers.update(headers or ({"retry-after": "1"} if refused.status == 503 else {}))
            await response(scope, receive, send_with_headers)

        scope["app"] = self  # makes Starlette raise for a wrong path or method
        try:
            self._check(scope["method"], scope["path"], Headers(scope=scope))
            await self._routes(scope, receive, send_with_headers)
        except Refused as refused:
            await refuse(refused)
        except HTTPException as error:
            code = error.detail.lower().replace(" ", "_")
            await refuse(
                Refused(error.status_code, code, f"{scope['method']} {scope['path']}: {error.detail}"), error.headers
            )
        except ClientDisconnect:
            _logger.debug("a client disconnected")
        except Exception:
            if has_begun:
                raise
            _logger.exception("a request failed")
            await refuse(Refused(500, "internal_error", "the request could not be answered"))

    def _check(self, method: str, path: str, headers: Headers) -> None:
        """Raise `Refused` for a wrong host name, a missing or wrong key, or a body of GET or HEAD."""
        if self._names is not None and not _is_own_host(headers.get("host", ""), self._names):
            raise Refused(421, "misdirected_request", "this host name is not a name of this machine")
        if self._knows is not None and self._needs_key(path) and not self._knows(self._key_of(headers)):
            raise Refused(401, "invalid_api_key", "the key is missing or wrong")
        if method in ("GET", "HEAD") and (headers.get("content-length", "0") != "0" or "transfer-encoding" in headers):
            raise Refused(413, "request_too_large", f"{path} does not accept a body")


class Bodies:
    """Reads request bodies within limits on each body and on all bodies in memory."""

    def __init__(self, limits: ServerLimits) -> None:
        """Create the reader.

        Args:
            limits: limits on body sizes, bodies in flight and waiting time.
        """
        self._limits = limits
        self.num_held = 0
        self._bytes_held = 0
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def held(self, request: Request, *, media_type: str = JSON) -> AsyncIterator[bytes]:
        """Context of a request's body, which counts against the limits until it exits.

        Raises `Refused` before the body is read.

        Args:
            request: the request.
            media_type: the only media type that is accepted.
        """
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != media_type:
            # This also blocks requests of web pages in a browser on this machine.
            raise Refused(415, "unsupported_media_type", f"send {media_type}")
        length, limit = request.headers.get("content-length", ""), self._limits.max_body_bytes
        if not (length.isascii() and length.isdigit()) or "transfer-encoding" in request.headers:
            raise Refused(411, "length_required", "send Content-Length, since chunked bodies are not supported")
        if len(length) > 18 or int(length) > limit:
            raise Refused(413, "request_too_large", f"a body has at most {limit} bytes")
        async with self.place(int(length)):
            yield await request.body()

    @asynccontextmanager
    async def place(self, num_bytes: int) -> AsyncIterator[None]:
        """Context that reserves room for a body. A body larger than the limit waits until no other one is in memory.

        Raises `Refused` if there is not enough room within `wait_seconds`.
        """
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(lambda: self._fits(num_bytes)), self._limits.wait_seconds)
            except TimeoutError:
                raise Refused(503, "busy", "busy") from None
            self.num_held += 1
            self._bytes_held += num_bytes
        try:
            yield
        finally:
            self.num_held -= 1
            self._bytes_held -= num_bytes
            async with self._changed:
                self._changed.notify_all()

    def _fits(self, num_bytes: int) -> bool:
        limit = self._limits.max_in_flight
        if limit is not None and self.num_held >= limit:
            return False
        return not self.num_held or self._bytes_held + num_bytes <= self._limits.max_bytes_in_flight


def bearer_key(headers: Headers) -> str:
    """Return the key of a request, or an empty text if the request lacks one.

    Args:
        headers: headers of the request.

    Example:
        >>> bearer_key(Headers({"Authorization": "Bearer secret"}))
        'secret'
    """
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _own_names() -> set[str]:
    return {socket.gethostname().lower(), socket.getfqdn().lower()}


def _is_own_host(host: str, names: set[str]) -> bool:
    """Whether the host is one of the names or an IP address, which DNS cannot point elsewhere."""
    match = _NAME_AND_PORT.fullmatch(host)
    if match is None:
        return False
    name = (match["v6"] or match["name"]).lower()
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name in names
    return True
