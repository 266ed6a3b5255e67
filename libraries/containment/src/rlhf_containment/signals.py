"""The hook plugin `lock-watch`: two signals that a run does not hear, as something holds Python's lock, end it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import FrameType
from typing import Any

from rlhf_core.distributed import stop_signals
from rlhf_core.hookspecs import hookimpl

from .lock_watch import LockWatch, lock_watch

_NOT_HEARD = (
    "error: two signals were not heard, since something holds Python's lock: the process is ended\n"
    "  -> a reward or an environment with isolate: true can be ended by itself"
)


class SignalWatch:
    """Has the watchdog told of each signal, by the system as it arrives and by Python as it is handled."""

    def __init__(self) -> None:
        self._undoing = ExitStack()

    @hookimpl
    def rlhf_run_start(self) -> None:
        """No effect outside the main thread, where no signals are handled."""
        if threading.current_thread() is not threading.main_thread():
            return
        watch = lock_watch()
        self._undoing.callback(watch.heard)
        self._undoing.callback(signal.set_wakeup_fd, watch.hear_signals(_NOT_HEARD))
        for number in stop_signals():
            if callable(handler := signal.getsignal(number)):
                signal.signal(number, partial(_handle, watch, handler))
                self._undoing.callback(signal.signal, number, handler)

    @hookimpl
    def rlhf_run_end(self) -> None:
        """Put the handlers of the run back."""
        self._undoing.close()


def _handle(watch: LockWatch, handler: Callable[[int, FrameType | None], Any], number: int, frame: FrameType) -> None:
    watch.heard()
    handler(number, frame)


signal_watch = SignalWatch()
