"""Marks whose code runs, on the event loop and on threads, where the run sees it also after a crash."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Coroutine, Generator
from contextvars import ContextVar
from functools import partial
from typing import Any

from ...workers import Workers
from ..slots import LOOP, Slots

EPISODE: ContextVar[int] = ContextVar("episode", default=0)
"""Number of the episode that a task belongs to; tasks that it makes inherit it."""


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
