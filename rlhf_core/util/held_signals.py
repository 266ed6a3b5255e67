"""Delays signals during an operation that must not be interrupted."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_signals() -> Iterator[None]:
    """Context that delays SIGINT, SIGTERM and a SIGHUP that is not ignored until its end.

    For short operations only, since they cannot be stopped. Has no effect outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    hang_up = () if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (signal.SIGHUP,)
    numbers = (signal.SIGINT, signal.SIGTERM, *hang_up)
    before = {number: signal.signal(number, lambda number, frame: held.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for one in held:
            os.kill(os.getpid(), one)
