"""A small process that outlives the driver briefly and ends what is left of its local Ray.

When a driver is killed, the kernel ends the processes that it started, and those end their workers. Ray's own agents,
however, belong to no worker and first try for a minute to reach their controller, which is gone. This process holds
the other end of a pipe: when that closes, however the driver ended, it ends every process of that Ray it has seen, and
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

_LOOK_SECONDS = 2.0
_GRACE_SECONDS = 2.0
"""Time for the processes to end by themselves."""
_END_SECONDS = 60.0


@contextmanager
def watched(roots: Collection[psutil.Process]) -> Iterator[None]:
    """Context after which the processes and all that they started are ended, or soon after this process is gone."""
    command = [sys.executable, "-I", __file__, *(str(root.pid) for root in roots)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as orphan_reaper:
        try:
            yield
        finally:
            orphan_reaper.communicate(timeout=_END_SECONDS)


def with_descendants(roots: Collection[psutil.Process]) -> set[psutil.Process]:
    """The processes that still run, and all that they started."""
    found = set()
    for root in roots:
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= {root, *root.children(recursive=True)}
    return found


def end(processes: Collection[psutil.Process]) -> None:
    """Wait a moment for them to end, then kill those that are left."""
    for process in psutil.wait_procs(processes, timeout=_GRACE_SECONDS)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def main(pids: Collection[int]) -> None:
    """Track the processes of these ids until standard input closes; then end them."""
    roots = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    seen = with_descendants(roots)
    while not select.select([sys.stdin], [], [], _LOOK_SECONDS)[0]:
        seen |= with_descendants(roots)
    end(seen | with_descendants(roots))


if __name__ == "__main__":
    main([int(pid) for pid in sys.argv[1:]])
