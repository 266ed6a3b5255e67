"""What SIGINT, SIGTERM and SIGHUP do to the command while no run handles them."""

from __future__ import annotations

import os
import signal
import threading

from rlhf_core.distributed.interrupts import stop_signals


def raise_at_signals() -> None:
    """Have signals whose handler is the system's raise KeyboardInterrupt."""
    for number in stop_signals():
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)


def drop_signals() -> None:
    """From here on a signal does nothing: it must not change the exit code. No effect outside the main thread."""
    if threading.current_thread() is threading.main_thread():
        for number in stop_signals():
            signal.signal(number, lambda number, frame: None)


def ignore_signals() -> None:
    """Ignore signals for the rest of the process, even after Python has removed its handlers."""
    for number in stop_signals():
        signal.signal(number, signal.SIG_IGN)


def exit_at_signals(code: int) -> None:
    """From here on a signal ends the process at once with `code`, even if threads or exit handlers still run."""
    for number in stop_signals():
        signal.signal(number, lambda number, frame: os._exit(code))
