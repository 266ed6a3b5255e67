"""Limits the processor time of a call in the main thread, as of a reward in its own process."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")
_AGAIN_SECONDS = 0.1


class TimeUp(Exception):
    """A call took more processor time than it may."""


def within(seconds: float, call: Callable[[], T]) -> T:
    """The result of `call`. Raises `TimeUp` if it takes more than so many seconds of the processor.

    A signal ends the call, which Python code and the regular expressions of `re` notice. It comes again and again
    until the call has ended, because Python drops an exception that is raised in a finalizer or in a callback of the
    garbage collector. There is no limit outside the main thread, where no signals arrive.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        return call()
    is_over = False

    def time_up(number: int, frame: FrameType | None) -> None:
        if not is_over:
            raise TimeUp

    before = signal.signal(signal.SIGVTALRM, time_up)
    try:
        with _dropped_quietly():
            signal.setitimer(signal.ITIMER_VIRTUAL, seconds, _AGAIN_SECONDS)
            try:
                return call()
            finally:
                is_over = True
    finally:
        is_over = True  # the signal may have come just before this was said above
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@contextmanager
def _dropped_quietly() -> Iterator[None]:
    """Prints nothing about a `TimeUp` that Python drops. The next signal raises another one."""
    report = sys.unraisablehook

    def report_others(unraisable: Any) -> None:
        if not isinstance(unraisable.exc_value, TimeUp):
            report(unraisable)

    sys.unraisablehook = report_others
    try:
        yield
    finally:
        sys.unraisablehook = report
