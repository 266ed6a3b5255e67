"""Tries each plugin in a separate process: one that crashes, hangs or changes the process affects no other.

`probe(...)` starts this module once; it forks for each plugin, so that heavy libraries are imported once for all.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from rlhf_core.errors import RlhfError
from rlhf_core.plugins.discovery import PluginRef, discover
from rlhf_core.util.did_you_mean import fold

from .trial import TrialOutcome, try_plugin

TRIAL_SECONDS = 120.0
"""Deadline of one plugin; importing a large library on a busy machine is slow."""
_SHARED = ("torch", "transformers")
_FEW = 3
"""Up to this many plugins it is quicker to import only what they need."""


def probe(refs: Sequence[PluginRef], *, trial_seconds: float = TRIAL_SECONDS) -> list[TrialOutcome]:
    """A verdict for each plugin, in order. Raises `RlhfError` when the prober itself fails."""
    wanted = json.dumps([[ref.kind, ref.name] for ref in refs])
    command = [sys.executable, "-m", __name__, wanted, str(trial_seconds)]
    limit = TRIAL_SECONDS + trial_seconds * len(refs)  # the first term: the prober's own imports
    # The prober gets this process's import search path.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False, env=environment)
    if done.returncode != 0:
        raise RlhfError(f"the process that tries plugins ended with {done.returncode}", hint=done.stderr[-2000:])
    return [TrialOutcome(*each) for each in json.loads(done.stdout)]


def main(arguments: Sequence[str]) -> None:
    """Try the plugins named in the first argument, each within the seconds of the second; verdicts to stdout."""
    wanted, trial_seconds = json.loads(arguments[0]), float(arguments[1])
    warnings.simplefilter("ignore")  # warnings of plugins and their libraries are not part of the verdict
    if len(wanted) > _FEW:
        for name in _SHARED:
            if find_spec(name) is not None:
                import_module(name)
    verdicts = [_forked(discover(kind)[fold(name)], trial_seconds) for kind, name in wanted]
    print(json.dumps(verdicts))


def _forked(ref: PluginRef, trial_seconds: float) -> TrialOutcome:
    """`try_plugin` in a child process."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _answer(ref, writing)
    os.close(writing)
    try:
        answer = _read(reading, trial_seconds)
    finally:
        os.close(reading)
        if not _has_ended(child):
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if answer is None:
        return TrialOutcome("broken", f"did not come to an end within {trial_seconds:.0f} seconds")
    if not answer:
        code = os.waitstatus_to_exitcode(status)
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return TrialOutcome("broken", f"its process ended {how}")
    found: Any = json.loads(answer)
    return TrialOutcome(*found)


def _answer(ref: PluginRef, writing: int) -> None:
    """In the child: try, write the verdict, and exit without running the parent's exit handlers."""
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(quiet, stream)
    try:
        verdict = try_plugin(ref)
    except Exception as error:  # a bug of ours; it must not look like a crash of the plugin
        verdict = TrialOutcome("broken", f"trying it failed: {type(error).__name__}: {error}")
    with os.fdopen(writing, "w", encoding="utf-8") as stream_out:
        json.dump(verdict, stream_out)
    os._exit(0)


def _read(reading: int, seconds: float) -> bytes | None:
    """Everything the child writes; None where it does not finish in time."""
    end = time.monotonic() + seconds
    parts: list[bytes] = []
    while True:
        ready, _, _ = select.select([reading], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            return None
        part = os.read(reading, 65536)
        if not part:
            return b"".join(parts)
        parts.append(part)


def _has_ended(child: int) -> bool:
    """Whether the child has exited; does not reap it."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


if __name__ == "__main__":
    main(sys.argv[1:])
