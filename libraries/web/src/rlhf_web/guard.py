"""The guard before an application: who may ask, under which name, and how much is read at once."""

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
    """The routes of a server, behind the checks that come before any of them (an ASGI application).

    Whatever is refused, here or by a route that raises `Refused`, is told in the server's own form.
    """

    def __init__(
        self,
        routes: Sequence[BaseRoute],
        *,
        refusal: Callable[[Refused], Response],
        knows: Callable[[str], bool] | None = None,
        needs_key: Callable[[str], bool] = lambda path: True,
        host: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Keep it before `routes`.

        Args:
            refusal: the response to a request that is refused.
            knows: whether a key (`Authorization: Bearer KEY`) may ask, in constant time; None asks for no key.
            needs_key: whether a path needs one.
            host: the address it listens at. Requests may name it, an address or this machine, and nothing else: a site
                whose name was made to point here (DNS rebinding) asks under its own name. None checks no name.
            headers: of every response.
        """
        self._routes = Router(routes, redirect_slashes=False)
        self._refusal = refusal
        self._knows = knows
        self._needs_key = needs_key
        self._names = None if host is None else {"localhost", host.lower(), *_own_names()}
        self._headers = headers or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        has_begun = False

        async def send_with_headers(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                MutableHeaders(scope=message).update(self._headers)
            await send(message)

        async def refuse(refused: Refused, headers: Mapping[str, str] | None = None) -> None:
            response = self._refusal(refused)
            response.headers.update(headers or ({"retry-after": "1"} if refused.status == 503 else {}))
            await response(scope, receive, send_with_headers)

        scope["app"] = self  # has Starlette raise for a wrong path or method
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
            _logger.debug("a client left")
        except Exception:
            if has_begun:
                raise
            _logger.exception("a request failed")
            await refuse(Refused(500, "internal_error", "it could not be answered"))

    def _check(self, method: str, path: str, headers: Headers) -> None:
        """Raises `Refused`."""
        if self._names is not None and not _is_among(headers.get("host", ""), self._names):
            raise Refused(421, "misdirected_request", "this host name is not this machine's")
        if self._knows is not None and self._needs_key(path) and not self._knows(bearer_key(headers)):
            raise Refused(401, "invalid_api_key", "the key is missing or wrong")
        if method in ("GET", "HEAD") and (headers.get("content-length", "0") != "0" or "transfer-encoding" in headers):
            raise Refused(413, "request_too_large", f"{path} takes no body")


class Bodies:
    """Reads bodies within limits on each, and on all that are held at once."""

    def __init__(self, limits: ServerLimits) -> None:
        self._limits = limits
        self.num_held = 0
        self._bytes_held = 0
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def held(self, request: Request) -> AsyncIterator[bytes]:
        """The JSON body of a request, which counts while it is held. Raises `Refused` before it is read."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
            # This also keeps web pages of a browser here from asking.
            raise Refused(415, "unsupported_media_type", f"send {JSON}")
        length, most = request.headers.get("content-length", ""), self._limits.max_body_bytes
        if not (length.isascii() and length.isdigit()) or "transfer-encoding" in request.headers:
            raise Refused(411, "length_required", "say Content-Length; a body in chunks is not taken")
        if len(length) > 18 or int(length) > most:
            raise Refused(413, "request_too_large", f"a body has at most {most} bytes")
        async with self.place(int(length)):
            yield await request.body()

    @asynccontextmanager
    async def place(self, num_bytes: int) -> AsyncIterator[None]:
        """Room for a body; one that is larger than all room waits until it is alone. Raises `Refused`."""
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
        most = self._limits.max_in_flight
        if most is not None and self.num_held >= most:
            return False
        return not self.num_held or self._bytes_held + num_bytes <= self._limits.max_bytes_in_flight


def bearer_key(headers: Headers) -> str:
    """The key that a request brings; empty without one."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _own_names() -> set[str]:
    return {socket.gethostname().lower(), socket.getfqdn().lower()}


def _is_among(host: str, names: set[str]) -> bool:
    """Whether it is an address, which nobody can make point elsewhere, or one of the names."""
    named = _NAME_AND_PORT.fullmatch(host)
    if named is None:
        return False
    name = (named["v6"] or named["name"]).lower()
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name in names
    return True
