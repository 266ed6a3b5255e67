"""Threads for plain functions that an event loop waits for: few while calls are quick, more as soon as some are not.

Handing every call to a thread of its own costs more than most calls take. Here one thread works through the calls
that wait; whenever some have waited for `PATIENCE_SECONDS`, more threads join it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from rlhf_core.util.bounded_thread import BoundedThread

PATIENCE_SECONDS = 0.005
SPARE_THREADS = 32
"""Calls that hang keep their threads; so many may before others wait for one."""
_LEAVE_SECONDS = 0.5
"""So long threads are waited for at the end; what still hangs then has failed long before."""

_Job = tuple["asyncio.Future[Any]", Callable[[], Any]]


class Workers:
    """At most `size` daemon threads of one event loop; `submit` and what is private are called on the loop only."""

    def __init__(self, loop: asyncio.AbstractEventLoop, size: int, name: str) -> None:
        self._loop = loop
        self._size = size
        self._name = name
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        """None ends a thread."""
        self._done: deque[tuple[asyncio.Future[Any], Any]] = deque()
        self._is_told = False
        """Whether the loop knows that something is in `_done`."""
        self._threads: list[threading.Thread] = []
        self._watch: asyncio.TimerHandle | None = None
        self._closed = False

    def submit(self, job: Callable[[], Any]) -> asyncio.Future[Any]:
        """Run `job` on a thread; its result. It must not raise: what may go wrong is part of its result.

        Raises `MemoryError` or `RuntimeError` if the system starts not even one thread.
        """
        if not self._threads:
            self._add()
        future: asyncio.Future[Any] = self._loop.create_future()
        self._jobs.put((future, job))
        if self._watch is None:
            self._watch = self._loop.call_later(PATIENCE_SECONDS, self._look)
        return future

    def close(self) -> None:
        """Let the threads end; those that hang are left behind. From any other thread, once the loop has stopped."""
        self._closed = True
        for _ in self._threads:
            self._jobs.put(None)
        deadline = time.monotonic() + _LEAVE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _look(self) -> None:
        """Have twice as many threads work where calls still wait."""
        self._watch = None
        if self._jobs.empty() or self._closed:
            return
        num_threads = len(self._threads)
        with suppress(MemoryError, RuntimeError):  # the system starts no more: those that there are work on
            for _ in range(min(num_threads, self._jobs.qsize(), self._size - num_threads)):
                self._add()
        self._watch = self._loop.call_later(PATIENCE_SECONDS, self._look)

    def _add(self) -> None:
        thread = BoundedThread(self._work, f"{self._name}-{len(self._threads)}")
        thread.start()
        self._threads.append(thread)

    def _work(self) -> None:
        while (waiting := self._jobs.get()) is not None and not self._closed:
            future, job = waiting
            self._done.append((future, job()))
            del waiting, future, job
            if not self._is_told:  # results that come together are told together
                self._is_told = True
                try:
                    self._loop.call_soon_threadsafe(self._give)
                except RuntimeError:  # the loop was closed while this call hung
                    return

    def _give(self) -> None:
        self._is_told = False  # before the first is taken: what is done from now on is told again
        while self._done:
            future, result = self._done.popleft()
            if not future.done():
                future.set_result(result)
