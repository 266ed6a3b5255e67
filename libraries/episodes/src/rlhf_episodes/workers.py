"""A thread pool for plain functions awaited by an event loop, with few threads while calls are fast.

Starting a thread per call would cost more than most calls take. Instead, one thread runs all queued calls. Whenever
calls have waited for `PATIENCE_SECONDS`, more threads are added.
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
"""Threads beyond the concurrency, for calls that hang and never free their thread."""
_JOIN_SECONDS = 0.5
"""Maximum time that `close` waits for threads. Calls that still hang have already exceeded their deadline."""

_Job = tuple["asyncio.Future[Any]", Callable[[], Any]]


class Workers:
    """At most `size` daemon threads of one event loop. `submit` and private methods are only called on the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, size: int, name: str) -> None:
        self._loop = loop
        self._size = size
        self._name = name
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        """Queue of calls. None ends a thread."""
        self._done: deque[tuple[asyncio.Future[Any], Any]] = deque()
        self._is_notified = False
        """Whether the loop was notified of results in `_done`."""
        self._threads: list[threading.Thread] = []
        self._watch: asyncio.TimerHandle | None = None
        self._closed = False

    def submit(self, job: Callable[[], Any]) -> asyncio.Future[Any]:
        """Run `job` on a thread and return a future of its result. The job must return its errors, not raise them.

        Raises `MemoryError` or `RuntimeError` if the system cannot start a single thread.
        """
        if not self._threads:
            self._add()
        future: asyncio.Future[Any] = self._loop.create_future()
        self._jobs.put((future, job))
        if self._watch is None:
            self._watch = self._loop.call_later(PATIENCE_SECONDS, self._grow)
        return future

    def close(self) -> None:
        """End the threads and abandon those that hang. Called on another thread once the loop has stopped."""
        self._closed = True
        for _ in self._threads:
            self._jobs.put(None)
        deadline = time.monotonic() + _JOIN_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _grow(self) -> None:
        """Double the number of threads if calls are still waiting."""
        self._watch = None
        if self._jobs.empty() or self._closed:
            return
        num_threads = len(self._threads)
        with suppress(MemoryError, RuntimeError):  # no more threads can be started, the existing ones continue
            for _ in range(min(num_threads, self._jobs.qsize(), self._size - num_threads)):
                self._add()
        self._watch = self._loop.call_later(PATIENCE_SECONDS, self._grow)

    def _add(self) -> None:
        thread = BoundedThread(self._work, f"{self._name}-{len(self._threads)}")
        thread.start()
        self._threads.append(thread)

    def _work(self) -> None:
        while (waiting := self._jobs.get()) is not None and not self._closed:
            future, job = waiting
            self._done.append((future, job()))
            del waiting, future, job
            if not self._is_notified:  # one notification for all results until `_deliver` runs
                self._is_notified = True
                try:
                    self._loop.call_soon_threadsafe(self._deliver)
                except RuntimeError:  # the loop was closed while this call hung
                    return

    def _deliver(self) -> None:
        self._is_notified = False  # reset first, so that later results send a new notification
        while self._done:
            future, result = self._done.popleft()
            if not future.done():
                future.set_result(result)
