"""Who is being run in the process of environments, in memory that it shares with the run: known also after a crash."""

from __future__ import annotations

import asyncio
import itertools
import mmap
import os
import threading
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

from ..workers import Workers

_NUMBER_BYTES = 8
LOOP = 0
"""The slot of the event loop; each thread has one of the others."""

EPISODE: ContextVar[int] = ContextVar("episode", default=0)
"""Number of the episode that a task belongs to; tasks that it makes inherit it."""


class Slots:
    """Numbers of the episodes whose code runs at this moment; 0 where none does."""

    def __init__(self, descriptor: int, count: int) -> None:
        """descriptor: of a file, which both processes map."""
        size = count * _NUMBER_BYTES
        if os.fstat(descriptor).st_size < size:
            os.truncate(descriptor, size)
        self._numbers = memoryview(mmap.mmap(descriptor, size)).cast("q")

    @contextmanager
    def running(self, slot: int, episode: int) -> Iterator[None]:
        """Mark the episode while the block runs."""
        if slot >= len(self._numbers):
            yield
            return
        before, self._numbers[slot] = self._numbers[slot], episode
        try:
            yield
        finally:
            self._numbers[slot] = before

    def read(self) -> set[int]:
        """The episodes. The process may have written anything."""
        return {number for number in self._numbers if number}

    def close(self) -> None:
        self._numbers.release()


class MarkedWorkers(Workers):
    """`Workers` whose jobs are marked."""

    def __init__(self, loop: asyncio.AbstractEventLoop, size: int, slots: Slots) -> None:
        super().__init__(loop, size, "environment")
        self._slots = slots
        self._places = itertools.count(LOOP + 1)
        self._own = threading.local()

    def submit(self, job: Callable[[], Any]) -> asyncio.Future[Any]:
        return super().submit(partial(self._marked, EPISODE.get(), job))

    def _marked(self, episode: int, job: Callable[[], Any]) -> Any:
        place = getattr(self._own, "place", None)
        if place is None:
            place = self._own.place = next(self._places)
        with self._slots.running(place, episode):
            return job()


def mark_tasks(loop: asyncio.AbstractEventLoop, slots: Slots) -> None:
    """Mark every task of the loop while it runs."""

    def task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        return asyncio.Task(_Marked(coroutine, EPISODE.get(), slots), loop=loop, **options)

    loop.set_task_factory(task)


class _Marked(Coroutine[Any, Any, Any]):
    """A coroutine whose steps are marked."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], episode: int, slots: Slots) -> None:
        self._coroutine = coroutine
        self._episode = episode
        self._slots = slots

    def send(self, value: Any) -> Any:
        with self._slots.running(LOOP, self._episode):
            return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        with self._slots.running(LOOP, self._episode):
            return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, None, Any]:
        return self._coroutine.__await__()
