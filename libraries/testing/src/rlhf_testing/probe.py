"""Checks plugins in another process: one that crashes or hangs affects no other, and not the command."""

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
"""Deadline of one plugin; a whole suite trains, and importing a large library on a busy machine is slow."""


def probe(refs: Sequence[PluginRef], *, whole: bool, check_seconds: float = CHECK_SECONDS) -> list[Verdict]:
    """A verdict on each plugin, in order (see `check_plugin`)."""
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
    """With this process's import search path, and without a limit on memory."""
    paths = os.pathsep.join(path for path in sys.path if path)
    return RequestProcess(__name__, memory_limit_bytes=sys.maxsize, environment={"PYTHONPATH": paths})


def _answer(request: bytes) -> bytes:
    kind, name, whole = json.loads(request)
    try:
        verdict = check_plugin(discover(kind)[fold(name)], whole=whole)
    except Exception as error:  # a bug of ours; it must not look like a crash of the plugin
        verdict = Verdict("broken", f"checking it failed: {type(error).__name__}: {error}")
    return json.dumps(verdict).encode()


if __name__ == "__main__":
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(quiet, stream)  # what plugins print is no part of a verdict
    serve_requests(int(sys.argv[1]), int(sys.argv[2]), _answer)
