"""Calls third-party functions with deadlines.

Threads here are daemons: a hung reward must not keep the process from exiting. A hung thread cannot be stopped, only
abandoned; with `isolate` a reward runs in a process, which can be stopped.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Generic, TypeVar

from ..errors import RewardError
from ..util.bounded_thread import BoundedThread
from .values import RewardFault

T = TypeVar("T")
MAX_ABANDONED = 32
"""Most hung threads of one reward before it fails for good."""
_PROBE_SECONDS = 1.0
_JOIN_SECONDS = 5.0


class DeadlinePassed(RewardFault):
    """A call did not return in time."""


def _settle(future: Future[T], job: Callable[[], T]) -> None:
    try:
        future.set_result(job())
    except BaseException as error:  # raised where the future is awaited
        future.set_exception(error)


class DaemonPool:
    """At most `size` daemon threads, started when there is work for them; each ends when there is none left."""

    def __init__(self, size: int, name: str) -> None:
        self._size = size
        self._name = name
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._threads: set[threading.Thread] = set()
        self._closed = False

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Run `job` on a thread of the pool. After `close` the future holds a `RewardError`."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                future.set_exception(self._stopped())
                return future
            self._waiting.append((future, job))
            if len(self._threads) < self._size:
                thread = BoundedThread(self._work, self._name)
                thread.start()
                self._threads.add(thread)
        return future

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._threads.discard(threading.current_thread())
                    return
                future, job = self._waiting.popleft()
            if future.set_running_or_notify_cancel():
                _settle(future, job)

    def close(self) -> None:
        """Fail jobs that have not started with a `RewardError`, and wait briefly for running ones."""
        with self._lock:
            self._closed = True
            for future, _ in self._waiting:
                future.set_exception(self._stopped())
            self._waiting.clear()
            running = self._threads - {threading.current_thread()}
        for thread in running:
            thread.join(_JOIN_SECONDS)

    def _stopped(self) -> RewardError:
        return RewardError("scoring was stopped: the run is ending", where=self._name)


class CallThread(Generic[T]):
    """A thread for one call, abandoned when the call passes its deadline.

    Not reused: a thread that has run a parallel torch operation holds OpenMP workers until it ends, and when these
    outnumber the cores, every parallel operation of the process is slowed by waking them.
    """

    def __init__(self, function: Callable[[], T], name: str) -> None:
        self._outcome: Future[T] = Future()
        self._thread = BoundedThread(_settle, name, (self._outcome, function))
        self._thread.start()

    def result(self, timeout_seconds: float) -> T:
        """The call's result. Raises its error, or `DeadlinePassed`."""
        if not wait([self._outcome], timeout_seconds).done:
            raise DeadlinePassed(f"gave no answer within {timeout_seconds:g} s")
        return self._outcome.result()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()


class AsyncLoop:
    """An event loop on its own thread; abandoned if a coroutine blocks it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self.abandoned = 0

    def run(self, make: Callable[[], Awaitable[T]], timeout_seconds: float) -> T:
        """The result of awaiting `make()` on the loop. Raises its error, or `DeadlinePassed`."""
        loop = self._running()

        async def awaited() -> T:
            try:
                return await make()
            except (KeyboardInterrupt, SystemExit) as error:  # these would end the loop and so other calls
                raise RewardFault(f"raised {type(error).__name__}: {error}") from error

        future = asyncio.run_coroutine_threadsafe(awaited(), loop)
        try:
            return future.result(timeout_seconds)
        except FutureTimeoutError:
            if future.done():  # the reward's own TimeoutError
                raise
            future.cancel()
            self._leave_if_blocked(loop)
            raise DeadlinePassed(f"gave no answer within {timeout_seconds:g} s") from None

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = BoundedThread(self._loop.run_forever, self._name)
                self._thread.start()
            return self._loop

    def _leave_if_blocked(self, loop: asyncio.AbstractEventLoop) -> None:
        answered = threading.Event()
        loop.call_soon_threadsafe(answered.set)
        if answered.wait(_PROBE_SECONDS):
            return
        with self._lock:
            if self._loop is loop:
                self._loop = self._thread = None
                self.abandoned += 1

    def close(self) -> None:
        """Cancel what is running and end the loop."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None:
            return
        stopped = asyncio.run_coroutine_threadsafe(_cancel_all(), loop)
        try:
            stopped.result(_JOIN_SECONDS)
        except FutureTimeoutError:
            return  # blocked: it cannot be closed; as a daemon it delays nothing
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_JOIN_SECONDS)
        loop.close()


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
