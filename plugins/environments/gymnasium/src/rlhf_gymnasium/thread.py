"""A thread of its own for an environment of the library, which is plain code that may hang or hold on to its thread."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


class OwnThread:
    """Runs functions one after another. It is a daemon: one that hangs is left behind and holds up no exit."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    async def __call__(self, function: Callable[..., T], *args: Any) -> T:
        """Call the function. Raises its errors; one that is no `Exception` becomes a `RuntimeError`."""
        future: asyncio.Future[T] = self._loop.create_future()

        def job() -> None:
            try:
                found, error = function(*args), None
            except BaseException as raised:  # a stranger's function may raise anything, SystemExit included
                found, error = None, raised
            with suppress(RuntimeError):  # the loop was closed meanwhile
                self._loop.call_soon_threadsafe(_give, future, found, error)

        self._jobs.put(job)
        return await future

    def end(self, last: Callable[[], None] | None = None) -> None:
        """Do `last` after what is being done, whatever becomes of it, and end. Does not wait."""
        if last is not None:
            self._jobs.put(last)
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            with suppress(Exception):  # of the last one: nobody waits for it
                job()


def _give(future: asyncio.Future[Any], found: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(found)
    elif isinstance(error, Exception) and not isinstance(error, StopIteration):
        future.set_exception(error)
    else:
        future.set_exception(RuntimeError(f"raised {type(error).__name__}: {error}"))
