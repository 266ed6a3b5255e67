"""Ctrl-C, SIGTERM and SIGHUP: the first one stops the run after the episode, the second one stops it immediately.

SIGUSR1, which batch systems send before a time limit, stops the run after the episode however often it arrives.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

INTERRUPT_FILE = "RLHF_INTERRUPT_FILE"
"""Environment variable with the path of a file whose existence requests a stop. Set by a launcher of processes."""
_AGAIN_SECONDS = 0.05
logger = logging.getLogger("rlhf")


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that request a stop of a run. A SIGHUP that is already ignored (`nohup`) stays ignored."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    return signals if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (*signals, signal.SIGHUP)


@contextmanager
def keep_interrupts() -> Iterator[None]:
    """Within the block, a KeyboardInterrupt that Python would drop is raised again a moment later.

    A signal handler runs at any point of the main thread. An exception in a destructor or callback is only printed.
    """
    previous = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            previous(unraisable)
            return
        timer = threading.Timer(_AGAIN_SECONDS, os.kill, (os.getpid(), signal.SIGINT))
        timer.daemon = True
        timer.start()

    sys.unraisablehook = hook
    try:
        yield
    finally:
        if sys.unraisablehook is hook:
            sys.unraisablehook = previous


@contextmanager
def handle_signals(handle: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Within the block, `stop_signals` call `handle`. No effect outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, handle) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


class InterruptFlag:
    """Context manager that sets `requested` on the first of `stop_signals`. No effect outside the main thread."""

    def __init__(self) -> None:
        self.requested = False
        self._stops_at_once = False
        self._contexts = ExitStack()

    def __call__(self) -> bool:
        shared = os.environ.get(INTERRUPT_FILE)
        return self.requested or (shared is not None and os.path.exists(shared))

    def __enter__(self) -> InterruptFlag:
        self._contexts.enter_context(keep_interrupts())
        self._contexts.enter_context(handle_signals(self._handle))
        return self

    def __exit__(self, *error: object) -> None:
        self._contexts.close()

    @contextmanager
    def unswallowed(self) -> Iterator[None]:
        """Within the block, an error after the second signal becomes the KeyboardInterrupt that a library swallowed."""
        try:
            yield
        except Exception as error:
            if self._stops_at_once:
                raise KeyboardInterrupt from error
            raise

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number != signal.SIGUSR1:
            self._stops_at_once = True
            raise KeyboardInterrupt
        self.requested = True
        name = signal.Signals(number).name
        logger.warning("%s: stopping after this episode, with a checkpoint (Ctrl-C again stops immediately)", name)


@contextmanager
def delay_signals() -> Iterator[None]:
    """Context that delays `stop_signals` until its end.

    Only for short operations, which cannot be stopped. No effect outside the main thread.
    """
    received: list[int] = []
    try:
        with handle_signals(lambda number, frame: received.append(number)):
            yield
    finally:
        for number in received:
            os.kill(os.getpid(), number)
