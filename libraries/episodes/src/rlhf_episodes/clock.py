"""The deadline of an environment's calls, which rests while the policy answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol


class Clock:
    """An environment's deadline for one call. It rests while the policy answers in any branch."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._until: float | None = None
        """When the environment's time ends; None while it is not its turn."""
        self._timer: asyncio.TimerHandle | None = None
        """One for many calls: making one for each costs more than most calls do."""
        self._answering = 0
        """Turns that the policy is being asked for."""
        self.passed: asyncio.Future[None] = self._loop.create_future()
        """Done once its time is over."""
        self.when_over: Callable[[], None] = partial(self.passed.set_result, None)
        """Called once its time is over."""
        self.doing = "run"
        """The last call to the environment, in words."""

    def start(self) -> None:
        """The environment's time begins (again)."""
        if self._answering:
            return
        self._until = self._loop.time() + self.seconds
        if self._timer is None:
            self._timer = self._loop.call_at(self._until, self._look)

    @property
    def is_running(self) -> bool:
        return self._until is not None

    def stop(self) -> None:
        self._until = None

    def _look(self) -> None:
        self._timer = None
        if self._until is None:
            return
        if self._loop.time() < self._until:
            self._timer = self._loop.call_at(self._until, self._look)
        elif not self.passed.done():
            self.when_over()

    @contextmanager
    def answering(self) -> Iterator[None]:
        """The policy's time, which is not the environment's."""
        self._answering += 1
        self.stop()
        try:
            yield
        finally:
            self._answering -= 1
            self.start()


class CallClock(Protocol):
    """Observer of every call."""

    doing: str

    def start(self) -> None: ...
