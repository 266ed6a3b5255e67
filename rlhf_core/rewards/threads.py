"""Calling a stranger's function without waiting for it for ever.

Threads here are daemons: a reward that hangs must not keep the process from ending. A hung thread cannot be
stopped, only left behind; `isolate` gives a reward a process, which can.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from typing import Any, Generic, TypeVar

from ..errors import RewardError
from .values import RewardFault

T = TypeVar("T")
MAX_ABANDONED = 32
"""Hung threads of one reward that are tolerated before it is given up."""
_PROBE_SECONDS = 1.0
_JOIN_SECONDS = 5.0


def stopped(where: str) -> RewardError:
    """The error of scores that nobody will compute any more."""
    return RewardError("scoring was stopped: the run is ending", where=where)


class DeadlinePassed(RewardFault):
    """A call had no answer in time."""


class CallThread(Generic[T]):
    """A thread for one call, left behind when the call passes its deadline.

    Not kept for the next call: a thread that has run a parallel operation of torch holds OpenMP workers until it ends,
    and where there are more of those than cores, every parallel operation of the whole process waits to be woken up.
    """

    def __init__(self, function: Callable[[], T], name: str) -> None:
        self._outcome: Future[T] = Future()
        self._thread = threading.Thread(target=self._work, args=(function,), name=name, daemon=True)
        self._thread.start()

    def result(self, timeout_seconds: float) -> T:
        """The call's result, or its error; `DeadlinePassed` where there is none in time."""
        if not wait([self._outcome], timeout_seconds).done:
            raise DeadlinePassed(f"gave no answer within {timeout_seconds:g} s")
        return self._outcome.result()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def _work(self, function: Callable[[], T]) -> None:
        try:
            self._outcome.set_result(function())
        except BaseException as error:  # raised again where the call was made
            self._outcome.set_exception(error)


class AsyncLoop:
    """An event loop on a thread of its own; one that is blocked by a coroutine is left behind."""

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
            except (KeyboardInterrupt, SystemExit) as error:  # they would end the loop, and with it other calls
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
                self._thread = threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True)
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
            return  # blocked: it cannot be closed, and being a daemon it holds nobody up
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_JOIN_SECONDS)
        loop.close()


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling `function` gives a coroutine."""
    while isinstance(function, partial):
        function = function.func
    if inspect.iscoroutinefunction(function):
        return True
    return not inspect.isroutine(function) and inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
