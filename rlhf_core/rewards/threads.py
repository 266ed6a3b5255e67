"""Runs functions and coroutines of plugins on separate threads, so that they cannot block the event loop.

Threads here are daemons: a hung reward must not keep the process from exiting. A hung thread cannot be stopped, only
abandoned. With `isolate` a reward runs in a process, which can be stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

from ..util.bounded_thread import BoundedThread
from ..util.error_text import error_text
from .values import RewardFault

T = TypeVar("T")
_PROBE_SECONDS = 1.0
_JOIN_SECONDS = 5.0


class DeadlinePassed(RewardFault):
    """A call did not return in time."""


def fault_of(error: BaseException) -> RewardFault:
    """Convert an error of a reward, which may be any `BaseException`, to a `RewardFault`."""
    if isinstance(error, RewardFault):
        return error
    fault = RewardFault(f"raised {error_text(error)}")
    fault.__cause__ = error
    return fault


class CallThread(BoundedThread):
    """A thread for one call of a plugin's function.

    Threads are not reused: a thread that ran a parallel torch operation holds OpenMP workers until it ends. If these
    outnumber the cores, waking them slows every parallel operation of the process.
    """

    def __init__(self, function: Callable[[], Any], name: str) -> None:
        """Start the call."""
        super().__init__(self._call, name, (function,))
        self.outcome: Future[Any] = Future()
        """Result of the call, or a `RewardFault`."""
        self.outcome.set_running_or_notify_cancel()  # a waiter that gives up must not cancel the call
        self.start()

    def _call(self, function: Callable[[], Any]) -> None:
        try:
            self.outcome.set_result(function())
        except BaseException as error:
            self.outcome.set_exception(fault_of(error))


class LoopThread:
    """An event loop on a separate thread."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self.thread = BoundedThread(self._loop.run_forever, name)
        self.thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop. Thread-safe."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def is_blocked(self) -> bool:
        """Whether a call blocks the loop. Must not be awaited on the loop itself."""
        try:
            await asyncio.wait_for(asyncio.wrap_future(self.submit(asyncio.sleep(0))), _PROBE_SECONDS)
        except TimeoutError:
            return True
        return False

    def close(self) -> None:
        """Cancel all tasks and stop the loop."""
        try:
            self.submit(_cancel_all()).result(_JOIN_SECONDS)
        except FutureTimeoutError:
            return  # a blocked loop cannot be closed, but as a daemon thread it does not delay the exit
        self._loop.call_soon_threadsafe(self._loop.stop)
        self.thread.join(_JOIN_SECONDS)
        self._loop.close()


async def awaited(answer: Awaitable[Any]) -> Any:
    """Await the result of a plugin. Raises `RewardFault`."""
    try:
        return await answer
    except BaseException as error:  # KeyboardInterrupt and SystemExit would end the loop, and other calls with it
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise  # canceled by core
        raise fault_of(error) from error


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
