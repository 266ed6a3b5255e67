"""Limits the processor time of a call in the main thread, such as that of an isolated reward's process."""

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
    """A call exceeded its processor time."""


def run_within(seconds: float, call: Callable[[], T]) -> T:
    """Return the result of `call`. Raises `TimeUp` if it takes more than `seconds` of processor time.

    A signal interrupts the call, in Python code as well as in the regular expressions of `re`. It is repeated until the
    call has ended, because Python drops an exception that is raised in a finalizer or in a callback of the garbage
    collector. Outside the main thread, which alone receives signals, the time is not limited.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        return call()
    is_over = False

    def time_up(number: int, frame: FrameType | None) -> None:
        if not is_over:
            raise TimeUp

    before = signal.signal(signal.SIGVTALRM, time_up)
    try:
        with _no_report_of_dropped():
            signal.setitimer(signal.ITIMER_VIRTUAL, seconds, _AGAIN_SECONDS)
            try:
                return call()
            finally:
                is_over = True
    finally:
        is_over = True  # the signal may have arrived just before the line above
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@contextmanager
def _no_report_of_dropped() -> Iterator[None]:
    """Context in which Python does not report a dropped `TimeUp`. The next signal raises another one."""
    report = sys.unraisablehook

    def report_others(unraisable: Any) -> None:
        if not isinstance(unraisable.exc_value, TimeUp):
            report(unraisable)

    sys.unraisablehook = report_others
    try:
        yield
    finally:
        sys.unraisablehook = report
