"""Processes of one kind, kept between their uses."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from .child import ChildProcess

ProcessT = TypeVar("ProcessT", bound=ChildProcess)


class PoolClosed(Exception):
    """No process is given out any more."""


class ProcessPool(Generic[ProcessT]):
    """Starts processes and keeps those that are free. Thread-safe."""

    def __init__(self, start: Callable[[], ProcessT]) -> None:
        self._start = start
        self._lock = threading.Lock()
        self._alive: set[ProcessT] = set()
        self._free: list[ProcessT] = []
        """The last one is taken first, which keeps few alive."""
        self._closed = False

    def take(self) -> ProcessT:
        """A process that was kept, or a new one. Raises `PoolClosed`, and `OSError` if the system starts no process."""
        with self._lock:
            if self._closed:
                raise PoolClosed
            while self._free:
                if (process := self._free.pop()).exit_code() is None:
                    return process
                self._alive.discard(process)
                process.end()
            process = self._start()
            self._alive.add(process)
            return process

    def keep(self, process: ProcessT) -> None:
        """Keep a process for the next `take`. One that exceeds its memory limit is ended instead."""
        with self._lock:
            if not (self._closed or process.excess()):
                self._free.append(process)
                return
        self.end(process)

    def end(self, process: ProcessT) -> None:
        """End a process that was taken."""
        with self._lock:
            self._alive.discard(process)
        process.end()

    def close(self) -> None:
        """End every process. One in use is killed; whoever uses it sees its connection close, and ends it."""
        with self._lock:
            self._closed = True
            alive, free = list(self._alive), self._free
            self._free = []
        for process in alive:
            process.kill()
        for process in free:
            self.end(process)
