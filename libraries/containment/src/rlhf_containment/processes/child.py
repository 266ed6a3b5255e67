"""A process that serves this one over a private socket, and can be killed with everything that it started.

Isolated rewards and environments and the parser of replies run in such processes. Messages in both directions have
their length in front (see `Frames`). What a process writes is JSON and is never unpickled.
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

from rlhf_core.util.bounded_thread import BoundedThread

START_SECONDS = 300.0
"""Deadline for a new process to import and build what it serves (a neural reward loads weights)."""
_EXIT_SECONDS = 2.0
"""How long a process that closed its connection may take to end."""
_END_SECONDS = 10.0
"""How long to wait for the end of a killed process."""
_LOOK_SECONDS = 0.01


class ChildProcess:
    """`python -m MODULE SOCKET PARENT`, with the child's end of the socket and this process's id.

    The child should begin with `killed_with_parent(PARENT)`. It leads its own session: Ctrl-C does not reach it, and
    whatever it starts is killed with it.
    """

    def __init__(
        self,
        module: str,
        *,
        memory_limit_bytes: int | None = None,
        output: int | IO[str] | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Start the process. Raises `OSError` or `MemoryError` if the system starts none.

        Args:
            memory_limit_bytes: resident memory that `excess` compares with; None is half of the available memory.
            output: where it prints to; None is this process's stderr.
            environment: variables to set besides those of this process.
        """
        self._memory_limit_bytes = memory_limit_bytes or default_memory_limit_bytes()
        self.connection, theirs = socket.socketpair()
        self._ended = threading.Event()
        started: Future[subprocess.Popen[bytes]] = Future()
        command = [sys.executable, "-m", module, str(theirs.fileno()), str(os.getpid())]
        # On a thread that lasts as long as the child: the kernel ends a child with the thread that started it.
        held = (command, theirs.fileno(), output, dict(environment), started, self._ended)
        try:
            BoundedThread(_hold, f"starter of {module}", held).start()
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
        """Resident memory of the process; 0 where the system does not tell."""
        try:
            pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        except (OSError, IndexError):
            return 0
        return pages * os.sysconf("SC_PAGE_SIZE")

    def excess(self) -> str:
        """How its memory exceeds the limit, as the end of a sentence; empty if it does not."""
        if (used := self.resident_bytes()) <= self._memory_limit_bytes:
            return ""
        return f"took {used:,} bytes of memory, more than its limit of {self._memory_limit_bytes:,}"

    def exit_code(self) -> int | None:
        """Exit code of a process that has ended, negative for a signal; None while it runs."""
        if self._process.returncode is not None or sys.platform == "darwin":
            return self._process.poll()
        # Its number is kept until `end`, so that no other process can be meant by it.
        found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def wait(self, seconds: float) -> int | None:
        """Its exit code, as soon as it has ended; None if it still runs after this time."""
        deadline = time.monotonic() + seconds
        while (code := self.exit_code()) is None and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        return code

    def death(self) -> str:
        """How a process ended that has closed its connection, as the end of a sentence. Waits a moment for it."""
        if (code := self.wait(_EXIT_SECONDS)) is None:
            return "closed its connection"
        if code < 0:
            return f"crashed: its process was ended by {signal.Signals(-code).name}"
        return f"ended its process with exit code {code}"

    def kill(self) -> None:
        """Have the kernel end it and all of its session, without waiting."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill it: it holds nothing that needs an orderly end."""
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # the system has it: its death is certain
            self._process.wait(_END_SECONDS)
        self._ended.set()
        self.connection.close()


def default_memory_limit_bytes() -> int:
    """Half of the memory this process may use: the machine's, or its control group's where that is less."""
    limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        path = Path("/sys/fs/cgroup") / name
        text = path.read_text().strip() if path.exists() else ""
        if text.isdigit():
            limit = min(limit, int(text))
    return limit // 2


def _hold(
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
            stdout=sys.__stderr__ if output is None else output,  # a command's own output is for what it says itself
            stderr=None if output is None else output,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(each for each in sys.path if each)} | environment,
            start_new_session=True,
        )
    except BaseException as error:  # raised again where the process is waited for
        started.set_exception(error)
        return
    started.set_result(process)
    del process
    ended.wait()
