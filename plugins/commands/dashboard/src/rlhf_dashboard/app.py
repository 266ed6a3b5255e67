"""The pages and what they ask for: GET only, with a key, for requests that name this machine as their host.

What lies under `/static` and the page itself hold nothing of any run and need no key. Everything else does, in the
header `Authorization`, which no other site can make a browser send. The page puts all text of runs into the document
as text, and a content security policy allows nothing but its own files.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import re
import socket
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rlhf_core.runfolder import RunFolder
from rlhf_pages import known_line, known_sample, sample_card_script

from .runs import Runs
from .tail import Gained, gained

_FILES = {
    "": ("index.html", "text/html"),
    "style.css": ("style.css", "text/css"),
    "charts.js": ("charts.js", "text/javascript"),
    "panels.js": ("panels.js", "text/javascript"),
    "dashboard.js": ("dashboard.js", "text/javascript"),
}
_NAME_AND_PORT = re.compile(r"(?:\[(?P<v6>[0-9a-fA-F:.]+)\]|(?P<name>[\w.-]+))(?::\d{1,5})?", re.ASCII)
_NEWEST_SAMPLES = 60
_SAMPLE_BYTES = 512 * 2**10
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


class _Json(JSONResponse):
    """In ASCII: what runs wrote, and names of folders, may hold half of a surrogate pair."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


def make_app(runs: Runs, *, key: str, host: str) -> ASGIApp:
    """The application. `host`: the address it listens at, which requests may name."""

    def listed(request: Request) -> Response:
        return _Json({"runs": runs.rows()})

    def details(request: Request) -> Response:
        folder = _folder(runs, request)
        return _missing() if folder is None else _Json(runs.details(folder))

    def metrics(request: Request) -> Response:
        folder = _folder(runs, request)
        if folder is None:
            return _missing()
        return _lines(gained(folder.metrics, request.query_params.get("mark"), known_line))

    def samples(request: Request) -> Response:
        folder = _folder(runs, request)
        if folder is None:
            return _missing()
        mark = request.query_params.get("mark")
        found = gained(folder.samples, mark, known_sample, newest_bytes=_SAMPLE_BYTES)
        return _lines(Gained(found.lines[-_NEWEST_SAMPLES:], found.mark, found.anew, found.more))

    pages = [Route("/" if not name else f"/static/{name}", _page(*file)) for name, file in _FILES.items()]
    script = Route("/static/sample_card.js", _text(sample_card_script(), "text/javascript"))
    routes = [
        Route("/api/runs", listed),
        Route("/api/runs/{run}", details),
        Route("/api/runs/{run}/metrics", metrics),
        Route("/api/runs/{run}/samples", samples),
    ]
    return _Guarded(Starlette(routes=[*pages, script, *routes]), key=key, host=host)


class _Guarded:
    """Refuses what names another host or brings no key, and adds the headers of every answer."""

    def __init__(self, app: ASGIApp, *, key: str, host: str) -> None:
        self._app = app
        self._key = key.encode()
        self._names = {"localhost", host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        refused = self._refused(Headers(scope=scope), scope["method"], scope["path"])
        await (refused or self._app)(scope, receive, send_with_headers)

    def _refused(self, headers: Headers, method: str, path: str) -> Response | None:
        if not self._is_own_name(headers.get("host", "")):
            return PlainTextResponse("this host name is not this machine's", 421)
        if method not in {"GET", "HEAD"}:
            return PlainTextResponse("read-only", 405, {"allow": "GET, HEAD"})
        if not path.startswith("/api/"):
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(given.encode(), self._key):
            return None
        return PlainTextResponse("the key is missing or wrong", 401, {"www-authenticate": "Bearer"})

    def _is_own_name(self, host: str) -> bool:
        """An address, which nobody can make point elsewhere, or a name of this machine."""
        named = _NAME_AND_PORT.fullmatch(host)
        if named is None:
            return False
        name = (named["v6"] or named["name"]).lower()
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self._names
        return True


def _page(name: str, media_type: str) -> Any:
    return _text((files(__package__) / "static" / name).read_text(encoding="utf-8"), media_type)


def _text(text: str, media_type: str) -> Any:
    def answer(request: Request) -> Response:
        return Response(text, media_type=media_type)

    return answer


def _folder(runs: Runs, request: Request) -> RunFolder | None:
    return runs.find(request.path_params["run"])


def _missing() -> Response:
    return PlainTextResponse("there is no such run", 404)


def _lines(found: Gained) -> Response:
    return _Json({"lines": list(found.lines), "mark": found.mark, "anew": found.anew, "more": found.more})
