"""The launcher's watch over its training processes: one that the others have lost is killed, and nobody stays behind.

Torch elastic asks the processes that are left after a failure to end, and kills those that do not within 30 s. A
process that is stopped, or hangs in a call, would hold the run for so long.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rlhf_core.util.bounded_thread import BoundedThread

_POLL_SECONDS = 0.2
_GRACE_SECONDS = 1.0
"""For a process that was only late to end by itself, once the others have given it up."""
_END_SECONDS = 5.0
_END_POLL_SECONDS = 0.02
_AFTER_SUCCESS_SECONDS = 60.0
"""How much longer than the deadline rank 0 may take over what it writes when all ranks are done."""


@contextmanager
def watched_ranks(request: Path, timeout_seconds: float) -> Iterator[RankWatch]:
    """Within, look after the processes started with the file `request`, beside which they say how they ended.

    None of them is left at the end. `timeout_seconds`: the longest that one of them waits for another. Linux only;
    elsewhere elastic's limits hold.
    """
    over = threading.Event()
    watch = RankWatch(request, timeout_seconds)

    def look_until_over() -> None:
        while not over.wait(_POLL_SECONDS):
            watch.look()

    thread = BoundedThread(look_until_over, "rank-watch")
    thread.start()
    try:
        yield watch
    finally:
        over.set()
        thread.join()
        watch.kill_all()


class RankWatch:
    """Kills the processes whose time is up."""

    def __init__(self, request: Path, timeout_seconds: float) -> None:
        self._request = request
        self._timeout_seconds = timeout_seconds
        self._seen: set[int] = set()
        self._due: dict[int, float] = {}
        """Rank -> when it is killed."""
        self.killed: set[int] = set()
        """Ranks that were killed here, not by something else."""

    def look(self) -> None:
        """Find out who has ended and who was given up; kill those who had time enough since."""
        now = time.monotonic()
        running = self._running()
        self._seen |= running.keys()
        for rank in self._given_up():
            self._due.setdefault(rank, now + _GRACE_SECONDS)
        ended = self._seen - running.keys()
        if ended:
            succeeded = all((self._request.parent / f"done-{rank}").exists() for rank in ended)
            limit = self._timeout_seconds + (_AFTER_SUCCESS_SECONDS if succeeded else _GRACE_SECONDS)
            for rank in running:
                self._due.setdefault(rank, now + limit)
        for rank, pid in running.items():
            if now >= self._due.get(rank, now + 1):
                self._kill(rank, pid)

    def kill_all(self) -> None:
        """Kill every process that still runs, and wait a moment for their end."""
        deadline = time.monotonic() + _END_SECONDS
        while (running := self._running()) and time.monotonic() < deadline:
            for rank, pid in running.items():
                self._kill(rank, pid)
            time.sleep(_END_POLL_SECONDS)

    def _kill(self, rank: int, pid: int) -> None:
        self.killed.add(rank)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def _given_up(self) -> set[int]:
        """Ranks that others could not reach, as their errors say."""
        return {
            rank
            for path in self._request.parent.glob("error-*.json")
            for rank in json.loads(path.read_text())["lost_ranks"]
        }

    def _running(self) -> dict[int, int]:
        """Rank -> process id of the children of this process that were started with the request."""
        found = {}
        for listed in Path("/proc/self/task").glob("*/children"):
            with suppress(OSError):  # a thread ended
                for pid in listed.read_text().split():
                    with suppress(OSError):  # the process ended
                        if str(self._request).encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                            found[_rank_of(pid)] = int(pid)
        return found


def _rank_of(pid: str) -> int:
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next(int(entry.removeprefix(b"RANK=")) for entry in entries if entry.startswith(b"RANK="))
