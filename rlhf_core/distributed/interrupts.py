"""Ctrl-C, SIGTERM and SIGHUP: the first asks the run to stop after the episode, the second stops at once."""

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
"""Environment variable: a file whose appearance asks this process to stop, set by the launcher of several."""
_AGAIN_SECONDS = 0.05
logger = logging.getLogger("rlhf")


def stop_signals() -> tuple[signal.Signals, ...]:
    """The signals that ask a run to stop. A SIGHUP that is ignored already (`nohup`) stays so."""
    heard = (signal.SIGINT, signal.SIGTERM)
    return heard if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (*heard, signal.SIGHUP)


@contextmanager
def interrupts_kept() -> Iterator[None]:
    """Within the block, a KeyboardInterrupt that Python would drop is raised again a moment later.

    A handler runs wherever the main thread is. What it raises inside a destructor or a callback is printed, and lost.
    """
    before = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            before(unraisable)
            return
        again = threading.Timer(_AGAIN_SECONDS, os.kill, (os.getpid(), signal.SIGINT))
        again.daemon = True
        again.start()

    sys.unraisablehook = hook
    try:
        yield
    finally:
        if sys.unraisablehook is hook:
            sys.unraisablehook = before


@contextmanager
def signals_to(handle: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Have `stop_signals` call `handle` within the block. No effect outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handle) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


class InterruptFlag:
    """Context manager that turns the first of `stop_signals` into `requested`; outside the main thread it is inert."""

    def __init__(self) -> None:
        self.requested = False
        self._stops_at_once = False
        self._entered = ExitStack()

    def __call__(self) -> bool:
        shared = os.environ.get(INTERRUPT_FILE)
        return self.requested or (shared is not None and os.path.exists(shared))

    def __enter__(self) -> InterruptFlag:
        self._entered.enter_context(interrupts_kept())
        self._entered.enter_context(signals_to(self._handle))
        return self

    def __exit__(self, *error: object) -> None:
        self._entered.close()

    @contextmanager
    def unswallowed(self) -> Iterator[None]:
        """Within the block, an error after the second signal is a KeyboardInterrupt, which a library has swallowed."""
        try:
            yield
        except Exception as error:
            if self._stops_at_once:
                raise KeyboardInterrupt from error
            raise

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            self._stops_at_once = True
            raise KeyboardInterrupt
        self.requested = True
        logger.warning("stopping after this episode, with a checkpoint; Ctrl-C again stops at once")


@contextmanager
def held_signals() -> Iterator[None]:
    """Context that delays `stop_signals` until its end.

    For short operations only, since they cannot be stopped. Has no effect outside the main thread.
    """
    held: list[int] = []
    try:
        with signals_to(lambda number, frame: held.append(number)):
            yield
    finally:
        for number in held:
            os.kill(os.getpid(), number)
