"""A child's output: its beginning is passed on to this process's stderr; a flood is detected."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

from ...util.printable import printable

MAX_BYTES = 8 << 20
WINDOW_SECONDS = 10.0
"""More than `MAX_BYTES` within so long is a flood."""
SHOWN_BYTES = 1 << 18
"""Bytes passed on of those printed within that time."""
_CHUNK_BYTES = 1 << 16


class OutputPipe:
    """A pipe for a child's stdout and stderr, read on a thread until the child and all it started have closed it."""

    def __init__(self, name: str, flooded: Callable[[], None]) -> None:
        """flooded: called on the thread, once; what comes after that is read and left out. `write_end` is for the child
        and is to be closed here once it has its copy."""
        self._read_end, self.write_end = os.pipe()
        self._name = name
        self._flooded = flooded
        self._thread = threading.Thread(target=self._pass_on, name=f"output of {name}", daemon=True)
        self._thread.start()

    def _pass_on(self) -> None:
        since, count, flooded = time.monotonic(), 0, False
        while chunk := os.read(self._read_end, _CHUNK_BYTES):
            if (now := time.monotonic()) - since > WINDOW_SECONDS:
                since, count = now, 0
            if count < SHOWN_BYTES:
                _show(printable(chunk.decode(errors="replace")))
                if count + len(chunk) >= SHOWN_BYTES:
                    _show(f"\n[what {self._name} prints within the next {WINDOW_SECONDS:g} s is left out]\n")
            count += len(chunk)
            if count > MAX_BYTES and not flooded:
                flooded = True
                self._flooded()
        os.close(self._read_end)


def _show(text: str) -> None:
    if sys.__stderr__ is not None:
        sys.__stderr__.write(text)
        sys.__stderr__.flush()
