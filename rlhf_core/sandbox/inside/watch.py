"""Waits for a program and its descendants, and stops them when together they exceed a limit."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import suppress

LOOK_SECONDS = 0.05
_TICKS = os.sysconf("SC_CLK_TCK")


def wait_for(program: int, *, wall_seconds: float, cpu_seconds: float, memory_bytes: int | None) -> tuple[int, str]:
    """Wait for `program`, reaping every process that ends; SIGCHLD must be blocked.

    Returns its exit code (128 + n for signal n) and the exceeded limit: `time`, `processor`, `memory` or nothing.
    `memory_bytes` bounds the memory of all processes in /proc, which must be those of the sandbox; None disables it.
    """
    deadline = time.monotonic() + wall_seconds
    while True:
        code = _collect(program)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = used.ru_utime + used.ru_stime
        if code is not None:
            return code, "processor" if seconds > cpu_seconds else ""
        size = 0
        if memory_bytes is not None:
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
        signal.sigtimedwait({signal.SIGCHLD}, min(left, LOOK_SECONDS))


def _collect(program: int) -> int | None:
    """Reap ended processes; returns the program's exit code if it is among them."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == program:
            code = os.waitstatus_to_exitcode(status)
            found = code if code >= 0 else 128 - code


def _processes() -> Iterator[tuple[int, float]]:
    """For each process but this one: bytes of memory not backed by a file on disk, and processor seconds."""
    own = str(os.getpid())
    for name in os.listdir("/proc"):
        if not name.isdecimal() or name == own:
            continue
        try:
            with open(f"/proc/{name}/status", encoding="utf-8", errors="replace") as file:
                kilobytes = [line.split()[1] for line in file if line.startswith(("RssAnon:", "RssShmem:"))]
            fields = _stat(name)
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
        yield sum(map(int, kilobytes)) * 1024, (int(fields[11]) + int(fields[12])) / _TICKS


def end_descendants() -> None:
    """Kill and reap all descendants of this process, which must be their subreaper."""
    while True:
        for name in filter(str.isdecimal, os.listdir("/proc")):
            with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
                if int(_stat(name)[1]) == os.getpid():
                    os.kill(int(name), signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(LOOK_SECONDS / 10)


def _stat(name: str) -> list[str]:
    """What /proc says of a process, after its name."""
    with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()
