"""Deadline of an environment's calls, paused while the policy generates."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol


class Clock:
    """Deadline for each call of an environment. It is paused while the policy generates a turn in any branch."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._deadline: float | None = None
        """Loop time at which the current call expires, or None while paused."""
        self._timer: asyncio.TimerHandle | None = None
        """Timer shared by many calls: creating one per call costs more than most calls do."""
        self._num_generating = 0
        """Turns that the policy is generating."""
        self.expired: asyncio.Future[None] = self._loop.create_future()
        """Done once a call has exceeded its deadline."""
        self.on_expired: Callable[[], None] = partial(self.expired.set_result, None)
        """Called when a call exceeds its deadline."""
        self.call_name = "run"
        """Name of the environment's latest call, for errors."""

    def start(self) -> None:
        """Start the deadline of a call, unless the policy is generating."""
        if self._num_generating:
            return
        self._deadline = self._loop.time() + self.seconds
        if self._timer is None:
            self._timer = self._loop.call_at(self._deadline, self._check)

    @property
    def is_running(self) -> bool:
        return self._deadline is not None

    def stop(self) -> None:
        self._deadline = None

    def _check(self) -> None:
        self._timer = None
        if self._deadline is None:
            return
        if self._loop.time() < self._deadline:
            self._timer = self._loop.call_at(self._deadline, self._check)
        elif not self.expired.done():
            self.on_expired()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the deadline while the policy generates. Afterwards it starts again in full."""
        self._num_generating += 1
        self.stop()
        try:
            yield
        finally:
            self._num_generating -= 1
            self.start()


class CallClock(Protocol):
    """Receives the name and the start of each call of an environment."""

    call_name: str

    def start(self) -> None: ...
