"""What a child prints: passed on to this process's stderr, and bounded."""

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
_CHUNK_BYTES = 1 << 16


class OutputPipe:
    """A pipe for a child's stdout and stderr, read on a thread until the child and all it started have closed it."""

    def __init__(self, name: str, flooded: Callable[[], None]) -> None:
        """flooded: called on the thread, once; what comes after that is read and left out."""
        self._read_end, self.write_end = os.pipe()
        self._flooded = flooded
        self._thread = threading.Thread(target=self._pass_on, name=f"output of {name}", daemon=True)
        self._thread.start()

    def close_write_end(self) -> None:
        """Once the child has its copy."""
        os.close(self.write_end)

    def _pass_on(self) -> None:
        since, count, flooded = time.monotonic(), 0, False
        while chunk := os.read(self._read_end, _CHUNK_BYTES):
            if (now := time.monotonic()) - since > WINDOW_SECONDS:
                since, count = now, 0
            count += len(chunk)
            if flooded:
                continue
            if count > MAX_BYTES:
                flooded = True
                self._flooded()
            elif sys.__stderr__ is not None:
                sys.__stderr__.write(printable(chunk.decode(errors="replace")))
                sys.__stderr__.flush()
        os.close(self._read_end)
