"""The hook plugin `lock-watch`: kills a run that cannot handle two signals because a call holds the GIL."""

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

_UNHANDLED = (
    "error: two signals could not be handled because a call holds the GIL: the process is killed\n"
    "  -> with isolate: true, a reward or an environment runs in a separate process that can be killed alone"
)


class SignalWatch:
    """Reports each signal to the watchdog twice: when it arrives and when its Python handler starts."""

    def __init__(self) -> None:
        self._cleanup = ExitStack()

    @hookimpl
    def rlhf_run_start(self) -> None:
        """Wrap the handlers of the stop signals. Does nothing outside the main thread, which alone handles signals."""
        if threading.current_thread() is not threading.main_thread():
            return
        watch = lock_watch()
        self._cleanup.callback(watch.report_handled)
        self._cleanup.callback(signal.set_wakeup_fd, watch.report_signals(_UNHANDLED))
        for number in stop_signals():
            if callable(handler := signal.getsignal(number)):
                signal.signal(number, partial(_handle, watch, handler))
                self._cleanup.callback(signal.signal, number, handler)

    @hookimpl
    def rlhf_run_end(self) -> None:
        """Restore the run's handlers."""
        self._cleanup.close()


def _handle(watch: LockWatch, handler: Callable[[int, FrameType | None], Any], number: int, frame: FrameType) -> None:
    watch.report_handled()
    handler(number, frame)


signal_watch = SignalWatch()
