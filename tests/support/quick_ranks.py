"""Forks the processes of `--num-processes` from their launcher, which is seconds faster than starting them.

Like a process started by a launch, each is a child of the launcher with its own session and environment, and without
the launcher's open files.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NoReturn

_POLL_SECONDS = 0.02


class ForkedRank:
    """The part of `Popen` that a launch uses."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _work(arguments, environment)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("rank", timeout or 0.0)
            time.sleep(_POLL_SECONDS)
        return code


@contextmanager
def quick_ranks() -> Iterator[None]:
    """Context in which `--num-processes` of this process forks its ranks."""
    from rlhf_strategies import ranks

    before = ranks._start_process
    ranks._start_process = ForkedRank  # type: ignore[assignment]
    try:
        yield
    finally:
        ranks._start_process = before


def _work(arguments: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Run the rank like `python -m rlhf_strategies.launched REQUEST`, without a new interpreter."""
    code = 1
    try:
        gc.freeze()  # the launcher's objects are never finalized here
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        atexit._clear()
        weakref.finalize._registry.clear()  # type: ignore[attr-defined]
        log = logging.getLogger("rlhf")
        log.handlers = []
        log.setLevel(logging.NOTSET)
        os.closerange(3, 4096)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = list(arguments[-2:])
        from rlhf_strategies.launched import _main

        code = _main(arguments[-1])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        os._exit(code)
