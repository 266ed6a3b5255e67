"""A circuit breaker: a server that loses every call is left alone for a while."""

from __future__ import annotations

import time
from collections.abc import Callable


class CircuitOpen(Exception):
    """The server is not asked at present."""


class Breaker:
    """Closed at first; opens after failures in a row, and lets one call through when its time is over."""

    def __init__(self, failures: int, seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = failures
        self._seconds = seconds
        self._clock = clock
        self._in_a_row = 0
        self._open_until: float | None = None

    def check(self) -> None:
        """Before a call. Raises `CircuitOpen`."""
        if self._open_until is None:
            return
        left = self._open_until - self._clock()
        if left > 0:
            raise CircuitOpen(f"{self._in_a_row} calls in a row were lost; it is asked again in {left:.0f} s")
        self._open_until = self._clock() + self._seconds  # the others wait for this call

    def succeeded(self) -> None:
        """After a reply."""
        self._in_a_row, self._open_until = 0, None

    def failed(self) -> None:
        """After a call that was lost for good."""
        self._in_a_row += 1
        if self._in_a_row >= self._most:
            self._open_until = self._clock() + self._seconds
