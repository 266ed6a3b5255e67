"""Threads for calls that may hang: they are daemons, which do not keep the process from ending."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

T = TypeVar("T")
_JOIN_SECONDS = 5.0


class DaemonPool:
    """At most `size` daemon threads, started when there is work for them."""

    def __init__(self, size: int, name: str, stopped: Callable[[], Exception] = CancelledError) -> None:
        """stopped: makes the error of a job that `close` came before."""
        self._size = size
        self._name = name
        self._stopped = stopped
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._idle = threading.Semaphore(0)
        self._closed = False

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Run `job` on a thread of the pool. After `close` the future holds the error of `stopped`."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                future.set_exception(self._stopped())
                return future
            self._jobs.put((future, job))
            if not self._idle.acquire(blocking=False) and len(self._threads) < self._size:
                thread = threading.Thread(target=self._work, name=f"{self._name}-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
        return future

    def _work(self) -> None:
        while (entry := self._jobs.get()) is not None:
            future, job = entry
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(job())
                except BaseException as error:  # handed to whoever waits for the future
                    future.set_exception(error)
            del entry, future, job  # an idle thread must not keep the last result alive
            self._idle.release()

    def close(self, wait_seconds: float = _JOIN_SECONDS) -> None:
        """Give what has not started its error and let the threads end; waits so long for what runs."""
        with self._lock:
            self._closed = True
            while True:
                try:
                    entry = self._jobs.get_nowait()
                except queue.Empty:
                    break
                if entry is not None:
                    entry[0].set_exception(self._stopped())
            for _ in self._threads:
                self._jobs.put(None)
        deadline = time.monotonic() + wait_seconds
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
