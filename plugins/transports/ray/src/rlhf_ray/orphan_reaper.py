"""A small process that outlives the driver for a moment, and ends what is left of its local Ray.

When a driver is killed, the kernel ends the processes that it started, and those end their workers. Ray's own agents
however, who belong to no worker, first try for a minute to tell their controller, which is gone. This process holds
the other end of a pipe: when that closes, however the driver went, it ends every process of that Ray it has seen.
It imports the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LOOK_SECONDS = 2.0
_GRACE_SECONDS = 2.0
"""For the processes to end by themselves."""
_END_SECONDS = 60.0

Process = tuple[int, str]
"""Process id and start time: an id alone may be somebody else's by now."""


@contextmanager
def watched() -> Iterator[None]:
    """Every process below this one, started by now or later, is gone soon after this one is."""
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid())]
    orphan_reaper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        assert orphan_reaper.stdin is not None
        orphan_reaper.stdin.close()
        orphan_reaper.wait(_END_SECONDS)


def descendants(pid: int) -> set[Process]:
    """Every process below `pid`; it itself is not one of them."""
    found: set[Process] = set()
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        for listed in Path(f"/proc/{parent}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # it ended while we looked
                for child in map(int, listed.read_text().split()):
                    started = start_time(child)
                    if started is not None and child != os.getpid():
                        found.add((child, started))
                        waiting.append(child)
    return found


def start_time(pid: int) -> str | None:
    """In clock ticks since boot; None when there is no such process, or only its exit code is left of it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def main(driver: int) -> None:
    """Look at what runs below the driver until standard input closes; then end what still does."""
    seen: set[Process] = set()
    while not select.select([sys.stdin], [], [], _LOOK_SECONDS)[0]:
        seen |= descendants(driver)
    deadline = time.monotonic() + _GRACE_SECONDS
    left = seen
    while left and time.monotonic() < deadline:
        left = {process for process in left if start_time(process[0]) == process[1]}
        time.sleep(0.1)
    for pid, _ in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]))
