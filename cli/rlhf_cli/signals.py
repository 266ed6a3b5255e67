"""Handling of SIGINT, SIGTERM, SIGHUP and SIGUSR1 while no run handles them."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress

from rlhf_core.distributed.interrupts import stop_signals

_WRITER = "rlhf-checkpoint"
"""Name of the thread of `checkpoint.background` (rlhf_strategies)."""


def raise_at_signals() -> None:
    """Raise KeyboardInterrupt at signals that still have the system's handler."""
    for number in stop_signals():
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)


def drop_signals() -> None:
    """Ignore signals from now on, so that they do not change the exit code. No effect outside the main thread."""
    if threading.current_thread() is threading.main_thread():
        for number in stop_signals():
            signal.signal(number, lambda number, frame: None)


def ignore_signals() -> None:
    """Ignore signals until the process ends, even after Python has removed its handlers."""
    for number in stop_signals():
        signal.signal(number, signal.SIG_IGN)


def exit_at_signals(code: int) -> None:
    """End the process with `code` at the next signal, even if threads or exit handlers still run."""
    for number in stop_signals():
        signal.signal(number, lambda number, frame: os._exit(code))


def end_with_writer(code: int) -> None:
    """End the process with `code` if a checkpoint is still being written, as after the second Ctrl-C.

    Before Python 3.14 an exiting interpreter ends threads that return from compiled code, and safetensors then aborts.
    """
    if any(thread.name == _WRITER for thread in threading.enumerate()):
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # a closed pipe
                stream.flush()
        os._exit(code)
