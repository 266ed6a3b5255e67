"""Check plugins in another process, so that a crash or hang affects neither other plugins nor the command."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from rlhf_containment.processes import ProcessFault, RequestProcess, serve_requests
from rlhf_core.plugins.discovery import PluginRef, discover
from rlhf_core.util.did_you_mean import fold

from .check import Verdict, check_plugin

CHECK_SECONDS = 600.0
"""Deadline per plugin. It is long, because a whole suite trains, and importing a large library may be slow."""


def probe(refs: Sequence[PluginRef], *, whole: bool, check_seconds: float = CHECK_SECONDS) -> list[Verdict]:
    """Return a verdict on each plugin, in order (see `check_plugin`)."""
    verdicts = []
    process: RequestProcess | None = None
    try:
        for ref in refs:
            process = process or _start()
            try:
                answer = process.ask(json.dumps([ref.kind, ref.name, whole]).encode(), check_seconds)
                verdicts.append(Verdict(*json.loads(answer)))
            except ProcessFault as fault:
                verdicts.append(Verdict("broken", f"it {fault}"))
                process.end()
                process = None
    finally:
        if process is not None:
            process.end()
    return verdicts


def _start() -> RequestProcess:
    """Start a process with this process's import search path and without a memory limit."""
    paths = os.pathsep.join(path for path in sys.path if path)
    return RequestProcess(__name__, memory_limit_bytes=sys.maxsize, environment={"PYTHONPATH": paths})


def _answer(request: bytes) -> bytes:
    kind, name, whole = json.loads(request)
    try:
        verdict = check_plugin(discover(kind)[fold(name)], whole=whole)
    except Exception as error:  # a bug in the check, which must not look like a crash of the plugin
        verdict = Verdict("broken", f"the check itself failed: {type(error).__name__}: {error}")
    return json.dumps(verdict).encode()


if __name__ == "__main__":
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(quiet, stream)  # discard the output of plugins
    serve_requests(int(sys.argv[1]), int(sys.argv[2]), _answer)
