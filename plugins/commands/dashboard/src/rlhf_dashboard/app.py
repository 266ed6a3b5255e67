"""The page and its data: GET requests only, with a key, whose host name is a name of this machine.

The page and the files under `/static` contain no data of runs and do not require a key. Everything else requires a key
in the header `Authorization`, which other sites cannot make a browser send. The page inserts all text of runs as plain
text, and a content security policy allows only its own files.
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
from rlhf_pages import known_line, known_sample, read_new_lines, read_picture, sample_card_script
from rlhf_web import Guard, Refused

from .runs import Runs

_NEWEST_SAMPLES = 60
_SAMPLE_BYTES = 512 * 2**10
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


class _Json(JSONResponse):
    """JSON in ASCII, since files of runs and names of folders may contain half of a surrogate pair."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


def make_app(runs: Runs, *, key: str, host: str) -> Guard:
    """Return the ASGI application.

    Args:
        runs: the runs to show.
        key: key that requests for data must send.
        host: address that the server listens at, as for `Guard`.
    """

    def list_runs(request: Request) -> Response:
        return _Json({"runs": runs.rows()})

    def details(request: Request) -> Response:
        return _Json(runs.details(_folder(runs, request)))

    def metrics(request: Request) -> Response:
        folder = _folder(runs, request)
        return _Json(asdict(read_new_lines(folder.metrics, request.query_params.get("mark"), known_line)))

    def samples(request: Request) -> Response:
        folder = _folder(runs, request)
        mark = request.query_params.get("mark")
        new = read_new_lines(folder.samples, mark, known_sample, newest_bytes=_SAMPLE_BYTES)
        return _Json({**asdict(new), "lines": new.lines[-_NEWEST_SAMPLES:]})

    def picture(request: Request) -> Response:
        data = read_picture(_folder(runs, request).path, request.path_params["name"])
        if data is None:
            raise Refused(404, "not_found", "this picture does not exist")
        return Response(data, media_type="image/png")

    page = (files(__package__) / "static" / "index.html").read_text(encoding="utf-8")
    routes = [
        Route("/", _text(page, "text/html")),
        Route("/static/sample_card.js", _text(sample_card_script(), "text/javascript")),
        Mount("/static", StaticFiles(packages=[("rlhf_dashboard", "static")])),
        Route("/api/runs", list_runs),
        Route("/api/runs/{run}", details),
        Route("/api/runs/{run}/metrics", metrics),
        Route("/api/runs/{run}/samples", samples),
        Route("/api/runs/{run}/images/{name}", picture),
    ]
    return Guard(
        routes,
        refusal=lambda _, refused: PlainTextResponse(str(refused), refused.status),
        knows=lambda sent: hmac.compare_digest(sent.encode(), key.encode()),
        needs_key=lambda path: path.startswith("/api/"),
        host=host,
        headers=_HEADERS,
    )


def _text(text: str, media_type: str) -> Any:
    def answer(request: Request) -> Response:
        return Response(text, media_type=media_type)

    return answer


def _folder(runs: Runs, request: Request) -> RunFolder:
    """Return the folder of the requested run. Raises `Refused` if the id is unknown."""
    folder = runs.find(request.path_params["run"])
    if folder is None:
        raise Refused(404, "not_found", "this run does not exist")
    return folder
