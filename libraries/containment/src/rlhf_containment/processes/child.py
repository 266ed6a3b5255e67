"""A process that serves this one over a private socket and can be killed together with its descendants.

Isolated rewards, isolated environments and the reply parser run in such processes. Messages in both directions are
prefixed with their length. Output of the process is JSON and is never unpickled.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from types import MappingProxyType
from typing import IO

import psutil

from rlhf_core.util.bounded_thread import BoundedThread

START_SECONDS = 300.0
"""Deadline for a new process to import its modules and build its object (a neural reward loads weights)."""
_EXIT_SECONDS = 2.0
"""Time to wait for the exit of a process that closed its connection."""
_END_SECONDS = 10.0
"""Time to wait for the exit of a killed process."""
_POLL_SECONDS = 0.01


class ChildProcess:
    """A process `python -m MODULE SOCKET PARENT`: the child's end of the socket and this process's id.

    The child should first call `killed_with_parent(PARENT)`. It leads its own session, so Ctrl-C does not reach it, and
    the processes that it starts are killed with it.
    """

    def __init__(
        self,
        module: str,
        *,
        memory_limit_bytes: int | None = None,
        output: int | IO[str] | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Start the process. Raises `OSError` or `MemoryError` if the system cannot start it.

        Args:
            module: dotted name of the module to run.
            memory_limit_bytes: limit on resident memory that `excess` checks. None is half of the available memory.
            output: destination of its stdout and stderr. None is this process's stderr.
            environment: variables to set in addition to those of this process.
        """
        self._memory_limit_bytes = memory_limit_bytes or default_memory_limit_bytes()
        self.connection, theirs = socket.socketpair()
        self._ended = threading.Event()
        started: Future[subprocess.Popen[bytes]] = Future()
        command = [sys.executable, "-m", module, str(theirs.fileno()), str(os.getpid())]
        # The starting thread must live as long as the child: the kernel kills a child with the thread that started it.
        arguments = (command, theirs.fileno(), output, dict(environment), started, self._ended)
        try:
            BoundedThread(_start_and_wait, f"starter of {module}", arguments).start()
            self._process = started.result(START_SECONDS)
        except BaseException:
            self.connection.close()
            raise
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def resident_bytes(self) -> int:
        """Resident memory of the process in bytes. 0 if the system does not report it."""
        try:
            return int(psutil.Process(self.pid).memory_info().rss)
        except psutil.Error:
            return 0

    def excess(self) -> str:
        """Report on exceeded memory, as the end of a sentence. Empty if the process is within its limit."""
        if (used := self.resident_bytes()) <= self._memory_limit_bytes:
            return ""
        return f"took {used:,} bytes of memory, more than its limit of {self._memory_limit_bytes:,}"

    def exit_code(self) -> int | None:
        """Exit code, negative for a signal. None while the process runs."""
        if self._process.returncode is not None or sys.platform == "darwin":
            return self._process.poll()
        # The process is not reaped before `end`, so that the system cannot reuse its id.
        state = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if state is None:
            return None
        return state.si_status if state.si_code == os.CLD_EXITED else -state.si_status

    def wait(self, seconds: float) -> int | None:
        """Wait for the process to exit and return its exit code. None if it still runs after `seconds`."""
        deadline = time.monotonic() + seconds
        while (code := self.exit_code()) is None and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return code

    def death(self) -> str:
        """Cause of a closed connection, as the end of a sentence. Waits up to two seconds for the exit code."""
        if (code := self.wait(_EXIT_SECONDS)) is None:
            return "closed its connection"
        if code < 0:
            return f"crashed: its process was ended by {signal.Signals(-code).name}"
        return f"ended its process with exit code {code}"

    def kill(self) -> None:
        """Kill the process and its session without waiting."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill the process, wait for its exit and close the socket. It holds nothing that needs an orderly exit."""
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # the signal is delivered: it will exit
            self._process.wait(_END_SECONDS)
        self._ended.set()
        self.connection.close()


def default_memory_limit_bytes() -> int:
    """Half of the memory that this process may use: the machine's, or its control group's if that is less."""
    limit = int(psutil.virtual_memory().total)
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        path = Path("/sys/fs/cgroup") / name
        text = path.read_text().strip() if path.exists() else ""
        if text.isdigit():
            limit = min(limit, int(text))
    return limit // 2


def _start_and_wait(
    command: list[str],
    descriptor: int,
    output: int | IO[str] | None,
    environment: dict[str, str],
    started: Future[subprocess.Popen[bytes]],
    ended: threading.Event,
) -> None:
    try:
        process = subprocess.Popen(
            command,
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
            stdout=sys.__stderr__ if output is None else output,  # stdout belongs to the command itself
            stderr=None if output is None else output,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(each for each in sys.path if each)} | environment,
            start_new_session=True,
        )
    except BaseException as error:  # raised again by `started.result`
        started.set_exception(error)
        return
    started.set_result(process)
    del process
    ended.wait()
