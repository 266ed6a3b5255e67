"""A server with the part of the Hugging Face hub's protocol that an upload of small files uses."""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml

TOKEN = "hf_aTokenOfTheTests"


@dataclass
class Hub:
    """The state of the server."""

    address: str = ""
    repositories: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Name -> `private`, `branches` and `files` (branch -> path -> content), and the `messages` of commits."""
    requests: list[str] = field(default_factory=list)
    users: dict[str, str] = field(default_factory=lambda: {TOKEN: "me"})
    stalled: threading.Event | None = None
    """An event for which commits wait."""

    def add(self, name: str, *, private: bool = False) -> None:
        self.repositories[name] = {"private": private, "files": {"main": {}}, "messages": []}


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Serve on a free port of this machine."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            self._answer(self.rfile.read(int(self.headers.get("content-length") or 0)))

        def _answer(self, body: bytes | None) -> None:
            hub.requests.append(f"{self.command} {self.path}")
            user = hub.users.get(self.headers.get("authorization", "").removeprefix("Bearer "))
            status, value = (401, {"error": "Invalid credentials"}) if user is None else answer(hub, self, user, body)
            content = json.dumps(value).encode()
            self.send_response(status)
            if "error" in value:
                self.send_header("x-error-message", value["error"])
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    hub.address = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        if hub.stalled is not None:
            hub.stalled.set()
        server.shutdown()
        server.server_close()
        thread.join()


def answer(hub: Hub, request: BaseHTTPRequestHandler, user: str, body: bytes | None) -> tuple[int, dict[str, Any]]:
    """Return status and JSON of the answer."""
    path = request.path.partition("?")[0]
    if path == "/api/whoami-v2":
        return 200, {"type": "user", "name": user, "orgs": []}
    if path == "/api/repos/create":
        return create(hub, user, json.loads(body or b"{}"))
    if path == "/api/validate-yaml":
        _, front_matter, _ = json.loads(body or b"{}")["content"].split("---\n", 2)
        base = yaml.safe_load(front_matter).get("base_model", "a/b")
        if re.fullmatch(r"[\w.-]+/[\w.-]+", base) is None:
            return 400, {"error": "invalid", "errors": [{"message": f'"base_model" is not valid: {base}'}]}
        return 200, {"errors": [], "warnings": []}
    _, _, kind, owner, name, *rest = path.split("/")
    repo = hub.repositories.get(f"{owner}/{name}")
    assert kind == "models"
    if repo is None or owner != user:
        return 404, {"error": "Repository not found"}
    if not rest:
        return 200, {"id": f"{owner}/{name}", "private": repo["private"], "siblings": [], "tags": []}
    if rest[0] == "branch":
        repo["files"].setdefault(rest[1], {})
        return 200, {}
    if rest[0] == "preupload":
        files = json.loads(body or b"{}")["files"]
        modes = [{"path": each["path"], "uploadMode": "regular", "shouldIgnore": False} for each in files]
        return 200, {"files": modes}
    if rest[0] == "commit":
        if hub.stalled is not None:
            hub.stalled.wait(600)
        return commit(hub, f"{owner}/{name}", rest[1], body or b"")
    return 404, {"error": f"no such page: {path}"}


def create(hub: Hub, user: str, wanted: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    owner = wanted.get("organization") or user
    name = f"{owner}/{wanted['name']}"
    if owner != user:
        return 403, {"error": f'You don\'t have the rights to create a model under the namespace "{owner}"'}
    address = {"url": f"{hub.address}/{name}"}
    if name in hub.repositories:
        return 409, {"error": "You already created this model repo", **address}
    hub.add(name, private=wanted.get("private") is True or wanted.get("visibility") == "private")
    return 200, address


def commit(hub: Hub, name: str, branch: str, body: bytes) -> tuple[int, dict[str, Any]]:
    repo = hub.repositories[name]
    for line in map(json.loads, body.splitlines()):
        if line["key"] == "header":
            repo["messages"].append(line["value"]["summary"])
        if line["key"] == "file":
            repo["files"][branch][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
    sha = f"{len(repo['messages']):040x}"
    return 200, {"success": True, "commitOid": sha, "commitUrl": f"{hub.address}/{name}/commit/{sha}"}
