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
        self._jobs: deque[_Job] = deque()
        self._done: deque[tuple[asyncio.Future[Any], Any]] = deque()
        self._wake = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._num_idle = 0
        self._is_told = False
        """Whether the loop knows that something is in `_done`."""
        self._watch: asyncio.TimerHandle | asyncio.Handle | None = None
        self._closed = False

    def submit(self, job: Callable[[], Any]) -> asyncio.Future[Any]:
        """Run `job` on a thread; its result. It must not raise: what may go wrong is part of its result.

        Raises `MemoryError` or `RuntimeError` if the system starts no thread.
        """
        future: asyncio.Future[Any] = self._loop.create_future()
        self._jobs.append((future, job))
        if self._watch is None:  # all calls of one turn of the loop go together
            self._watch = self._loop.call_soon(self._look, 1)
        return future

    def close(self) -> None:
        """Let the threads end; those that hang are left behind. From any other thread, once the loop has stopped."""
        self._closed = True
        self._jobs.clear()
        for _ in self._threads:
            self._wake.release()
        deadline = time.monotonic() + _LEAVE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _look(self, number: int) -> None:
        """Have `number` more threads work, and twice as many where calls go on waiting."""
        self._watch = None
        if not self._jobs or self._closed:
            return
        try:
            for _ in range(min(number, len(self._jobs))):
                self._add()
        except (MemoryError, RuntimeError) as error:  # the system starts no thread
            while self._jobs and not self._threads:
                self._jobs.popleft()[0].set_exception(error)
        self._watch = self._loop.call_later(PATIENCE_SECONDS, self._look, 2 * number)

    def _add(self) -> None:
        with self._lock:
            if self._num_idle:
                self._num_idle -= 1
                self._wake.release()
                return
        if len(self._threads) < self._size:
            thread = BoundedThread(self._work, f"{self._name}-{len(self._threads)}")
            thread.start()
            self._threads.append(thread)

    def _work(self) -> None:
        while not self._closed:
            try:
                future, job = self._jobs.popleft()
            except IndexError:
                with self._lock:
                    self._num_idle += 1
                self._wake.acquire()
                continue
            self._done.append((future, job()))
            del future, job
            self._tell()

    def _tell(self) -> None:
        with self._lock:
            if self._is_told or self._closed:
                return
            self._is_told = True
        try:
            self._loop.call_soon_threadsafe(self._give)
        except RuntimeError:  # the loop was closed while this call hung
            self._closed = True

    def _give(self) -> None:
        with self._lock:
            self._is_told = False
        while self._done:
            future, result = self._done.popleft()
            if not future.done():
                future.set_result(result)
