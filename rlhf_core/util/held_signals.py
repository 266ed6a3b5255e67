"""Delays signals during an operation that must not be interrupted."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_signals() -> Iterator[None]:
    """Context that delays SIGINT and SIGTERM until its end; has no effect outside the main thread.

    For short operations only, since they cannot be stopped.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda number, frame: held.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for one in held:
            os.kill(os.getpid(), one)
