"""Runs functions and coroutines of others on threads of their own, away from the event loop that waits for them.

Threads here are daemons: a hung reward must not keep the process from exiting. A hung thread cannot be stopped, only
abandoned; with `isolate` a reward runs in a process, which can be stopped.
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
    """What a reward raised, which may be anything, KeyboardInterrupt included."""
    if isinstance(error, RewardFault):
        return error
    fault = RewardFault(f"raised {error_text(error)}")
    fault.__cause__ = error
    return fault


class CallThread(BoundedThread):
    """A thread for one call of a stranger's function.

    Not reused: a thread that has run a parallel torch operation holds OpenMP workers until it ends, and when these
    outnumber the cores, every parallel operation of the process is slowed by waking them.
    """

    def __init__(self, function: Callable[[], Any], name: str) -> None:
        """Begin the call."""
        super().__init__(self._call, name, (function,))
        self.outcome: Future[Any] = Future()
        """Its result, or a `RewardFault`."""
        self.outcome.set_running_or_notify_cancel()  # whoever stops waiting for it does not cancel it
        self.start()

    def _call(self, function: Callable[[], Any]) -> None:
        try:
            self.outcome.set_result(function())
        except BaseException as error:
            self.outcome.set_exception(fault_of(error))


class LoopThread:
    """An event loop on a thread of its own."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self.thread = BoundedThread(self._loop.run_forever, name)
        self.thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run it there."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def is_blocked(self) -> bool:
        """Whether something holds up the loop. Not to be asked on the loop itself."""
        try:
            await asyncio.wait_for(asyncio.wrap_future(self.submit(asyncio.sleep(0))), _PROBE_SECONDS)
        except TimeoutError:
            return True
        return False

    def close(self) -> None:
        """Cancel what is running and end the loop."""
        try:
            self.submit(_cancel_all()).result(_JOIN_SECONDS)
        except FutureTimeoutError:
            return  # blocked: it cannot be closed; as a daemon it delays nothing
        self._loop.call_soon_threadsafe(self._loop.stop)
        self.thread.join(_JOIN_SECONDS)
        self._loop.close()


async def awaited(answer: Awaitable[Any]) -> Any:
    """The result of a stranger's awaitable. Raises `RewardFault`."""
    try:
        return await answer
    except BaseException as error:  # KeyboardInterrupt and SystemExit would end the loop and so other calls
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise  # by us
        raise fault_of(error) from error


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
