"""A thread whose start has a deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

_WAITS = 4
_WAIT_SECONDS = 5.0
"""Several waits, because the first may time out while other code holds the GIL."""


class BoundedThread(threading.Thread):
    """A daemon thread. `start` raises `MemoryError` if the thread ends before it has started.

    `threading.Thread.start` would wait forever for a thread that runs out of memory (`ulimit -v`) in its first steps.
    """

    def __init__(self, target: Callable[..., object], name: str, args: tuple[Any, ...] = ()) -> None:
        super().__init__(target=target, name=name, args=args, daemon=True)
        self._started: threading.Event = _BoundedEvent()  # CPython's event, which `start` waits for without a deadline


class _BoundedEvent(threading.Event):
    def wait(self, timeout: float | None = None) -> bool:
        for _ in range(_WAITS):
            if super().wait(_WAIT_SECONDS):
                return True
        raise MemoryError("a thread could not start: the process is out of memory (is there a limit: ulimit -v?)")
