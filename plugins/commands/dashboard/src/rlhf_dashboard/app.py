"""The pages and what they ask for: GET only, with a key, for requests that name this machine as their host.

What lies under `/static` and the page itself hold nothing of any run and need no key. Everything else does, in the
header `Authorization`, which no other site can make a browser send. The page puts all text of runs into the document
as text, and a content security policy allows nothing but its own files.
"""

from __future__ import annotations

import hmac
import json
from dataclasses import asdict
from importlib.resources import files
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from rlhf_core.runfolder import RunFolder
from rlhf_pages import known_line, known_sample, sample_card_script
from rlhf_web import Guard, Refused

from .runs import Runs
from .tail import gained

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


def make_app(runs: Runs, *, key: str, host: str) -> Guard:
    """The application. `host`: the address it listens at, which requests may name."""

    def listed(request: Request) -> Response:
        return _Json({"runs": runs.rows()})

    def details(request: Request) -> Response:
        return _Json(runs.details(_folder(runs, request)))

    def metrics(request: Request) -> Response:
        folder = _folder(runs, request)
        return _Json(asdict(gained(folder.metrics, request.query_params.get("mark"), known_line)))

    def samples(request: Request) -> Response:
        folder = _folder(runs, request)
        mark = request.query_params.get("mark")
        found = gained(folder.samples, mark, known_sample, newest_bytes=_SAMPLE_BYTES)
        return _Json({**asdict(found), "lines": found.lines[-_NEWEST_SAMPLES:]})

    page = (files(__package__) / "static" / "index.html").read_text(encoding="utf-8")
    routes = [
        Route("/", _text(page, "text/html")),
        Route("/static/sample_card.js", _text(sample_card_script(), "text/javascript")),
        Mount("/static", StaticFiles(packages=[("rlhf_dashboard", "static")])),
        Route("/api/runs", listed),
        Route("/api/runs/{run}", details),
        Route("/api/runs/{run}/metrics", metrics),
        Route("/api/runs/{run}/samples", samples),
    ]
    return Guard(
        routes,
        refusal=lambda refused: PlainTextResponse(str(refused), refused.status),
        knows=lambda given: hmac.compare_digest(given.encode(), key.encode()),
        needs_key=lambda path: path.startswith("/api/"),
        host=host,
        headers=_HEADERS,
    )


def _text(text: str, media_type: str) -> Any:
    def answer(request: Request) -> Response:
        return Response(text, media_type=media_type)

    return answer


def _folder(runs: Runs, request: Request) -> RunFolder:
    """Raises `Refused`."""
    folder = runs.find(request.path_params["run"])
    if folder is None:
        raise Refused(404, "not_found", "there is no such run")
    return folder
