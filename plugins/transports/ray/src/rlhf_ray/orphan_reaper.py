"""A small process that briefly outlives the driver and ends the remaining processes of its local Ray.

When a driver is killed, the kernel ends the processes that it started, and those end their workers. However, Ray's
agents do not belong to a worker and first try for a minute to reach their controller, which has exited. This process
holds the other end of a pipe. When the pipe closes, for any reason, it ends every process of that Ray it has seen, and
no other process of the driver.
"""

from __future__ import annotations

import contextlib
import select
import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import psutil

_POLL_SECONDS = 5.0
"""Each look at the machine's processes takes up to 40 ms."""
_GRACE_SECONDS = 2.0
"""Grace period for the processes to exit on their own."""
_END_SECONDS = 60.0


@contextmanager
def reaper(roots: Collection[psutil.Process]) -> Iterator[None]:
    """Context on whose exit, or soon after the death of this process, `roots` and their descendants are ended."""
    command = [sys.executable, "-I", __file__, *(str(root.pid) for root in roots)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as orphan_reaper:
        try:
            yield
        finally:
            orphan_reaper.communicate(timeout=_END_SECONDS)


def find_descendants(roots: Collection[psutil.Process]) -> set[psutil.Process]:
    """Find the processes that are still running and all their descendants."""
    processes = set()
    for root in roots:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes |= {root, *root.children(recursive=True)}
    return processes


def end_processes(processes: Collection[psutil.Process]) -> None:
    """Wait briefly for the processes to exit, then kill the others."""
    for process in psutil.wait_procs(processes, timeout=_GRACE_SECONDS)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def main(pids: Collection[int]) -> None:
    """Track the processes of these ids until standard input closes, then end them."""
    roots = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    seen = find_descendants(roots)
    while not select.select([sys.stdin], [], [], _POLL_SECONDS)[0]:
        seen |= find_descendants(roots)
    end_processes(seen | find_descendants(roots))


if __name__ == "__main__":
    main([int(pid) for pid in sys.argv[1:]])
