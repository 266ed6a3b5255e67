"""A small watchdog process that ends this one when it is blocked and cannot act itself.

A call that holds the GIL (a backtracking pattern, a number with 10**10 digits) blocks every thread of its process,
including those that watch deadlines and handle Ctrl-C. So deadlines of calls inside this process are reported to the
watchdog, which ends this process when a deadline has passed without action; signals are reported too, and two
unhandled ones end it. Before it ends this process, it has the stacks of all threads printed. Run as a program
(`python lock_watch.py FD PID GRACE`), this file is the watchdog; it uses the standard library only.
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
"""Time to act on a passed deadline, or on a second signal, before the process is ended."""
_LOOK_SECONDS = 0.25
_END_SECONDS = 5.0
_MAX_MESSAGE = 600
_NEWLINE, _FIRST_OF_TEXT = 10, 32
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
STACKS_SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGUSR2)
"""Has the watched process print its stacks. A real-time signal, if the system has them, since libraries use others."""
_STACKS_SECONDS = 1.0
_STDERR = 2


class LockWatch:
    """The watched process's side: starts the watchdog; thread-safe."""

    def __init__(self, grace_seconds: float) -> None:
        read, self._told = os.pipe()
        os.set_blocking(self._told, False)
        faulthandler.register(STACKS_SIGNAL, file=_STDERR)  # its handler is in C and does not need Python's lock
        arguments = [__file__, str(read), str(os.getpid()), str(grace_seconds)]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", *arguments],
                pass_fds=[read],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the process it watches
            )
        finally:
            os.close(read)
        self._numbers = itertools.count()
        atexit.register(self._close, os.getpid())

    @contextmanager
    def deadline(self, seconds: float, message: str) -> Iterator[None]:
        """Context of a call with a deadline: if it is not left in time, the process is ended with `message`."""
        number = next(self._numbers)
        self._tell({"begin": number, "seconds": seconds, "message": message[:_MAX_MESSAGE]})
        try:
            yield
        finally:
            self._tell({"end": number})

    def hear_signals(self, message: str) -> int:
        """Report SIGINT and SIGTERM to the watchdog as they arrive, handled or not. Call from the main thread.

        Python writes a signal's number to the same pipe, as a byte that occurs in no line.

        Returns the file descriptor that `signal.set_wakeup_fd` had before.
        """
        self._tell({"message": message})
        return signal.set_wakeup_fd(self._told, warn_on_full_buffer=False)

    def heard(self) -> None:
        """Report that a signal has reached its handler."""
        self._tell({"heard": True})

    def _tell(self, what: dict[str, Any]) -> None:
        line = json.dumps(what).encode() + b"\n"  # below 4096 bytes, which a pipe takes whole: no lock is needed,
        try:  # which a handler of a signal could not wait for
            os.write(self._told, line)
        except BlockingIOError:
            self._process.kill()  # it is stuck, and must not end this process for messages it missed
        except BrokenPipeError:
            return  # it was ended: deadlines still work while the GIL is free

    def _close(self, owner: int) -> None:
        if os.getpid() == owner:  # and not a fork of it
            self._process.kill()
            self._process.wait(_END_SECONDS)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None


def lock_watch() -> LockWatch:
    """The watch of this process: started at the first call, restarted if it has died."""
    watch = _watch_of(os.getpid())
    if not watch.is_alive:
        _watch_of.cache_clear()
        watch = _watch_of(os.getpid())
    return watch


@lru_cache(maxsize=1)
def _watch_of(pid: int) -> LockWatch:
    return LockWatch(GRACE_SECONDS)


class _Watcher:
    """The watchdog's side: tracks pending waits and ends the watched process when one takes too long."""

    def __init__(self, pid: int, grace_seconds: float) -> None:
        self._pid = pid
        self._grace = grace_seconds
        self._waits: dict[int, tuple[float, str]] = {}
        self._unheard = 0
        self._on_signals = ""

    def told(self, what: dict[str, Any]) -> None:
        """Handle one line from the watched process."""
        if "begin" in what:
            self._waits[what["begin"]] = (time.monotonic() + what["seconds"] + self._grace, what["message"])
        elif "end" in what:
            self._waits.pop(what["end"], None)
        elif "heard" in what:
            self._unheard = 0
            self._waits.pop(-1, None)
        else:
            self._on_signals, self._unheard = what["message"], 0

    def signalled(self, number: int) -> None:
        """Note a signal that arrived at the watched process."""
        if number in _SIGNALS:
            self._unheard += 1
            if self._unheard == 2:
                self._waits[-1] = (time.monotonic() + self._grace, self._on_signals)

    def look(self) -> None:
        """End the watched process if a deadline has passed; time in which it was stopped does not count."""
        if self._is_stopped():
            now = time.monotonic()
            self._waits = {key: (max(until, now + self._grace), text) for key, (until, text) in self._waits.items()}
            return
        for until, message in self._waits.values():
            if time.monotonic() > until:
                sys.stderr.write(f"{message}\nwhat its threads do, the newest first:\n")
                sys.stderr.flush()
                with suppress(ProcessLookupError):  # it has ended by itself
                    os.kill(self._pid, STACKS_SIGNAL)
                    time.sleep(_STACKS_SECONDS)
                    os.kill(self._pid, signal.SIGKILL)
                sys.exit(0)

    def _is_stopped(self) -> bool:
        try:
            state = Path(f"/proc/{self._pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):  # a system without /proc, or it has ended
            return False
        return state in "Tt"


def _main(told: int, pid: int, grace_seconds: float) -> None:
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    watcher = _Watcher(pid, grace_seconds)
    line = bytearray()
    with selectors.DefaultSelector() as ready:
        ready.register(told, selectors.EVENT_READ)
        while True:
            if ready.select(_LOOK_SECONDS):
                chunk = os.read(told, 65536)
                if not chunk:
                    return  # the watched process has ended
                for byte in chunk:
                    if byte == _NEWLINE:  # or SIGUSR1, which comes between lines
                        if line:
                            watcher.told(json.loads(line))
                        line.clear()
                    elif byte < _FIRST_OF_TEXT:
                        watcher.signalled(byte)
                    else:
                        line.append(byte)
            watcher.look()


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
