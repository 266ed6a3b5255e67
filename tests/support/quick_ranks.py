"""Forks the processes of `--num-processes` and of the engine vllm from the process that starts them, seconds faster.

Like a process that is started, each is a child with its own session and environment, and without the open files of its
parent.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

_POLL_SECONDS = 0.02


class ForkedProcess:
    """The part of `Popen` that a launch and a `ChildProcess` use."""

    def __init__(self, main: Callable[[], int], environment: Mapping[str, str], *, keep: int = -1) -> None:
        """Fork a process that runs `main`, with one open file: `keep`."""
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _work(main, environment, keep)

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

    def start(arguments: Sequence[str], environment: Mapping[str, str]) -> ForkedProcess:
        def main() -> int:
            sys.argv = list(arguments[-2:])
            from rlhf_strategies.launched import _main

            return _main(arguments[-1])

        return ForkedProcess(main, environment)

    before = ranks._start_process
    ranks._start_process = start  # type: ignore[assignment]
    try:
        yield
    finally:
        ranks._start_process = before


@contextmanager
def quick_vllm() -> Iterator[None]:
    """Context in which this process forks the processes of its engines `vllm`."""
    from rlhf_containment.processes import child

    plain = child._start_and_wait

    def start_and_wait(
        command: list[str], descriptor: int, output: Any, environment: dict[str, str], started: Any, ended: Any
    ) -> None:
        if command[2] != "rlhf_vllm.serve":
            plain(command, descriptor, output, environment, started, ended)
            return

        def main() -> int:
            import torch

            from rlhf_vllm.serve import main as serve

            torch.set_num_threads(1)  # threads of the process that forks do not exist here
            serve(descriptor)
            return 0

        started.set_result(ForkedProcess(main, os.environ | environment, keep=descriptor))
        ended.wait()

    child._start_and_wait = start_and_wait
    try:
        yield
    finally:
        child._start_and_wait = plain


def _work(main: Callable[[], int], environment: Mapping[str, str], keep: int) -> NoReturn:
    """Run `main` like the module of a new interpreter."""
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
        os.closerange(3, max(keep, 3))
        os.closerange(max(keep + 1, 3), 4096)
        os.environ.clear()
        os.environ.update(environment)
        code = main()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        os._exit(code)
