"""A small process that outlives the driver briefly and ends what is left of its local Ray.

When a driver is killed, the kernel ends the processes that it started, and those end their workers. Ray's own agents,
however, belong to no worker and first try for a minute to reach their controller, which is gone. This process holds
the other end of a pipe: when that closes, however the driver ended, it ends every process of that Ray it has seen, and
no other process of the driver. It imports the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_LOOK_SECONDS = 2.0
_GRACE_SECONDS = 2.0
"""Time for the processes to end by themselves."""
_END_SECONDS = 60.0

Process = tuple[int, str]
"""Process id and start time, since the id alone may have been reused."""


@contextmanager
def watched() -> Iterator[Callable[[], set[Process]]]:
    """Context for starting Ray: it is ended at exit, or soon after this process is gone.

    Yields a function to call once Ray has started, which returns Ray's processes: later ones count as its own only
    if one of these started them.
    """
    before = children(os.getpid())
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), _line(before)]
    orphan_reaper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    assert orphan_reaper.stdin is not None
    told = orphan_reaper.stdin

    def has_started() -> set[Process]:
        roots = {process for process in children(os.getpid()) - before if process[0] != orphan_reaper.pid}
        told.write(_line(roots).encode() + b"\n")
        told.flush()
        return roots

    try:
        yield has_started
    finally:
        told.close()
        orphan_reaper.wait(_END_SECONDS)


def _line(processes: set[Process]) -> str:
    return " ".join(f"{pid}:{started}" for pid, started in processes)


def _processes(line: str) -> set[Process]:
    pairs = (each.split(":") for each in line.split())
    return {(int(pid), started) for pid, started in pairs}


def children(pid: int) -> set[Process]:
    """The processes that `pid` has started and not waited for."""
    found: set[Process] = set()
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            for child in map(int, listed.read_text().split()):
                if (started := start_time(child)) is not None:
                    found.add((child, started))
    return found


def with_descendants(processes: set[Process]) -> set[Process]:
    """Those that still run, and all their descendants."""
    found: set[Process] = set()
    waiting = list(processes)
    while waiting:
        process = waiting.pop()
        if process in found or start_time(process[0]) != process[1]:  # its id may have been reused
            continue
        found.add(process)
        waiting += children(process[0])
    return found


def start_time(pid: int) -> str | None:
    """Start time in clock ticks since boot; None when there is no such process, or it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def main(driver: int, before: set[Process]) -> None:
    """Track that Ray's processes until standard input closes; then end those that are left.

    Until its first processes are reported, the driver's children that are not in `before` count as such.
    """
    roots: set[Process] | None = None
    seen: set[Process] = set()
    is_told = True
    while is_told:
        if select.select([sys.stdin], [], [], _LOOK_SECONDS)[0]:
            if line := sys.stdin.readline():
                roots, seen = _processes(line), set()
            else:
                is_told = False
        new = children(driver) - before if roots is None else roots
        seen |= with_descendants({process for process in new if process[0] != os.getpid()})
    deadline = time.monotonic() + _GRACE_SECONDS
    left = seen
    while left and time.monotonic() < deadline:
        left = {process for process in left if start_time(process[0]) == process[1]}
        time.sleep(0.1)
    for pid, _ in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), _processes(sys.argv[2]))
