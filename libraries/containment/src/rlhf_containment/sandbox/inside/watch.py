"""Waits for a program and its descendants, and stops them when together they exceed a limit."""

from __future__ import annotations

import os
import resource
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress

from .kernel import Unavailable

CHECK_SECONDS = 0.05
_TICKS = os.sysconf("SC_CLK_TCK")
_KINDS = ("RssAnon:", "RssShmem:", "VmSwap:", "VmPTE:")
"""Page tables count, since reading a large mapping needs no other memory."""


def wait_for(
    program: int, *, wall_seconds: float, cpu_seconds: float, memory_bytes: int | None, socket_bytes: int
) -> tuple[int, str]:
    """Wait for the process `program` and reap every process that exits. SIGCHLD must be blocked.

    Args:
        program: process id.
        wall_seconds: limit on wall-clock time.
        cpu_seconds: limit on processor time of all processes together.
        memory_bytes: limit on memory of all processes in /proc, which must be those of the sandbox, and of their
            sockets. None disables it.
        socket_bytes: counted per socket.

    Returns:
        Exit code (128 + n for signal n) and the exceeded limit: `time`, `processor`, `memory` or an empty text.
    """
    deadline = time.monotonic() + wall_seconds
    while True:
        code = _collect(program)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = used.ru_utime + used.ru_stime
        if code is not None:
            return code, "processor" if seconds > cpu_seconds or code == 128 + signal.SIGXCPU else ""
        if memory_bytes is not None:
            size = num_sockets() * socket_bytes
            for each_size, each_seconds in _processes():
                size += each_size
                seconds += each_seconds
            if size > memory_bytes:
                return 128 + signal.SIGKILL, "memory"
        if seconds > cpu_seconds:
            return 128 + signal.SIGXCPU, "processor"
        left = deadline - time.monotonic()
        if left <= 0:
            return 128 + signal.SIGKILL, "time"
        signal.sigtimedwait({signal.SIGCHLD}, min(left, CHECK_SECONDS))


def _collect(program: int) -> int | None:
    """Reap exited processes and return the program's exit code if it is among them."""
    exit_code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return exit_code
        if pid == 0:
            return exit_code
        if pid == program:
            code = os.waitstatus_to_exitcode(status)
            exit_code = code if code >= 0 else 128 - code


def _processes() -> Iterator[tuple[int, float]]:
    """Bytes of memory not backed by a file on disk, and processor seconds, of each process except this one.

    The seconds include those of its exited children.
    """
    own = str(os.getpid())
    for name in os.listdir("/proc"):
        if not name.isdecimal() or name == own:
            continue
        try:
            size = _memory(f"/proc/{name}")
            fields = _stat(name)
        except (FileNotFoundError, ProcessLookupError):  # it exited meanwhile
            continue
        yield size, sum(map(int, fields[11:15])) / _TICKS


def _memory(process: str) -> int:
    """Memory of a process in bytes that is not backed by a file on disk, swapped out or not, with its page tables."""
    # The status of an exited first thread lacks sizes, though its process continues.
    for path in (process, *(f"{process}/task/{each}" for each in os.listdir(f"{process}/task"))):
        with open(f"{path}/status", encoding="utf-8", errors="replace") as file:
            lines = [line.split() for line in file if line.startswith(_KINDS)]
        if lines:
            return sum(int(line[1]) for line in lines) * 1024
    return 0


def num_sockets() -> int:
    """Number of sockets in this network namespace, including those in transit through another socket."""
    with open("/proc/self/net/sockstat", encoding="ascii") as file:
        return int(file.readline().split()[-1])


def check_num_sockets() -> None:
    """Raise `Unavailable` if the system does not count sockets."""
    first, second = socket.socketpair()
    with first, second:
        if num_sockets() < 2:
            raise Unavailable("a count of sockets (/proc/net/sockstat)")


def bytes_of_a_socket() -> int:
    """Maximum memory of a socket in bytes: its buffer, which the last message may exceed by half."""
    first, second = socket.socketpair()
    with first, second:
        return first.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) * 3 // 2


def remaining(seconds: float, *, memory_bytes: int, socket_bytes: int) -> tuple[list[str], bool]:
    """Names of the other processes of this process namespace that have not exited after a while.

    Args:
        seconds: time that they have.
        memory_bytes: limit on their memory and that of their sockets, as in `wait_for`.
        socket_bytes: counted per socket.

    Returns:
        The names, and whether the limit on memory was exceeded, which ends the wait.
    """
    deadline = time.monotonic() + seconds
    while True:
        _collect(0)
        names = []
        for name in filter(str.isdecimal, os.listdir("/proc")):
            with suppress(FileNotFoundError, ProcessLookupError):  # it exited meanwhile
                if int(name) != os.getpid():
                    with open(f"/proc/{name}/comm", encoding="utf-8", errors="replace") as file:
                        names.append(file.read().strip())
        is_too_large = num_sockets() * socket_bytes + sum(size for size, _ in _processes()) > memory_bytes
        if not names or is_too_large or time.monotonic() > deadline:
            return names, bool(names) and is_too_large
        time.sleep(CHECK_SECONDS)


def end_all() -> None:
    """Kill and reap all other processes of this process namespace, whose first process this is."""
    with suppress(ProcessLookupError):  # there are none
        os.kill(-1, signal.SIGKILL)
    with suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def end_descendants() -> None:
    """Kill and reap all descendants of this process, which must be their subreaper."""
    while True:
        for name in filter(str.isdecimal, os.listdir("/proc")):
            with suppress(FileNotFoundError, ProcessLookupError):  # it exited meanwhile
                if int(_stat(name)[1]) == os.getpid():
                    os.kill(int(name), signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(CHECK_SECONDS / 10)


def _stat(name: str) -> list[str]:
    """Fields of `/proc/PID/stat` after the process name."""
    with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()
