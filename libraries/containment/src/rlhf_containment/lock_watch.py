"""A small watchdog process that ends this process when a call holding the GIL blocks all of its threads.

Such a call (a backtracking pattern, a number with 10**10 digits) also blocks the threads that watch deadlines and
handle Ctrl-C. Deadlines of calls and incoming signals are therefore reported to the watchdog. It prints the stacks of
all threads of this process and kills it if a deadline has passed or two signals have arrived and were not handled. Run
as a program (`python lock_watch.py FD PID GRACE`), this file is the watchdog. It uses the standard library only.
"""

from __future__ import annotations

import atexit
import faulthandler
import itertools
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

GRACE_SECONDS = 5.0
"""Time to act on a passed deadline or a second signal before the process is killed."""
_CHECK_SECONDS = 0.25
_END_SECONDS = 5.0
_MAX_MESSAGE = 600
_NEWLINE, _FIRST_OF_TEXT = 10, 32
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
STACKS_SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGUSR2)
"""Makes the watched process print its stacks. A real-time signal if available, since libraries use the others."""
_STACKS_SECONDS = 1.0
_STDERR = 2


class LockWatch:
    """The watched process's side, which starts the watchdog. Thread-safe."""

    def __init__(self, grace_seconds: float) -> None:
        read, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        faulthandler.register(STACKS_SIGNAL, file=_STDERR)  # its handler is in C and does not need Python's lock
        arguments = [__file__, str(read), str(os.getpid()), str(grace_seconds)]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", *arguments],
                pass_fds=[read],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is meant for the watched process
            )
        finally:
            os.close(read)
        self._numbers = itertools.count()
        atexit.register(self._close, os.getpid())

    @contextmanager
    def deadline(self, seconds: float, message: str) -> Iterator[None]:
        """Context of a call with a deadline, after which the watchdog prints `message` and kills this process."""
        number = next(self._numbers)
        self._send({"begin": number, "seconds": seconds, "message": message[:_MAX_MESSAGE]})
        try:
            yield
        finally:
            self._send({"end": number})

    def report_signals(self, message: str) -> int:
        """Report SIGINT and SIGTERM to the watchdog as they arrive, handled or not. Call from the main thread.

        Python writes a signal's number to the same pipe, as a byte that never occurs in a line.

        Args:
            message: printed when two unhandled signals end this process.

        Returns:
            The previous file descriptor of `signal.set_wakeup_fd`.
        """
        self._send({"message": message})
        return signal.set_wakeup_fd(self._pipe, warn_on_full_buffer=False)

    def report_handled(self) -> None:
        """Report that a signal has reached its handler."""
        self._send({"handled": True})

    def _send(self, message: dict[str, Any]) -> None:
        # Writes below 4096 bytes to a pipe are atomic, so no lock is needed. A signal handler could not wait for one.
        line = json.dumps(message).encode() + b"\n"
        try:
            os.write(self._pipe, line)
        except BlockingIOError:
            self._process.kill()  # it is stuck, and must not kill this process because of messages that it missed
        except BrokenPipeError:
            return  # the watchdog has exited. Deadlines still work while the GIL is free

    def _close(self, owner: int) -> None:
        if os.getpid() == owner:  # not in a fork of it
            self._process.kill()
            self._process.wait(_END_SECONDS)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None


def lock_watch() -> LockWatch:
    """Return the watch of this process. Started at the first call and restarted if it has died."""
    watch = _cached_watch(os.getpid())
    if not watch.is_alive:
        _cached_watch.cache_clear()
        watch = _cached_watch(os.getpid())
    return watch


@lru_cache(maxsize=1)
def _cached_watch(pid: int) -> LockWatch:
    return LockWatch(GRACE_SECONDS)


class _Watcher:
    """The watchdog's side: tracks pending deadlines and kills the watched process when one has passed."""

    def __init__(self, pid: int, grace_seconds: float) -> None:
        self._pid = pid
        self._grace = grace_seconds
        self._waits: dict[int, tuple[float, str]] = {}
        self._num_unhandled = 0
        self._signals_message = ""

    def handle_message(self, message: dict[str, Any]) -> None:
        """Handle one line from the watched process."""
        if "begin" in message:
            self._waits[message["begin"]] = (time.monotonic() + message["seconds"] + self._grace, message["message"])
        elif "end" in message:
            self._waits.pop(message["end"], None)
        elif "handled" in message:
            self._num_unhandled = 0
            self._waits.pop(-1, None)
        else:
            self._signals_message, self._num_unhandled = message["message"], 0

    def record_signal(self, number: int) -> None:
        """Record a signal that arrived at the watched process."""
        if number in _SIGNALS:
            self._num_unhandled += 1
            if self._num_unhandled == 2:
                self._waits[-1] = (time.monotonic() + self._grace, self._signals_message)

    def check_deadlines(self) -> None:
        """Kill the watched process if a deadline has passed. Time in which it was stopped does not count."""
        if self._is_stopped():
            now = time.monotonic()
            self._waits = {key: (max(until, now + self._grace), text) for key, (until, text) in self._waits.items()}
            return
        for until, message in self._waits.values():
            if time.monotonic() > until:
                sys.stderr.write(f"{message}\nstacks of its threads, the newest first:\n")
                sys.stderr.flush()
                with suppress(ProcessLookupError):  # it has exited
                    os.kill(self._pid, STACKS_SIGNAL)
                    time.sleep(_STACKS_SECONDS)
                    os.kill(self._pid, signal.SIGKILL)
                sys.exit(0)

    def _is_stopped(self) -> bool:
        try:
            state = Path(f"/proc/{self._pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):  # a system without /proc, or the process has exited
            return False
        return state in "Tt"


def _main(pipe: int, pid: int, grace_seconds: float) -> None:
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    watcher = _Watcher(pid, grace_seconds)
    line = bytearray()
    with selectors.DefaultSelector() as ready:
        ready.register(pipe, selectors.EVENT_READ)
        while True:
            if ready.select(_CHECK_SECONDS):
                chunk = os.read(pipe, 65536)
                if not chunk:
                    return  # the watched process has exited
                for byte in chunk:
                    if byte == _NEWLINE:  # or SIGUSR1, which comes between lines
                        if line:
                            watcher.handle_message(json.loads(line))
                        line.clear()
                    elif byte < _FIRST_OF_TEXT:
                        watcher.record_signal(byte)
                    else:
                        line.append(byte)
            watcher.check_deadlines()


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
