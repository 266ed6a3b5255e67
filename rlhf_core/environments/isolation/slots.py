"""Who is being run in the process of environments, in memory that it shares with the run: known also after a crash."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

_NUMBER_BYTES = 8
LOOP = 0
"""The slot of the event loop; each thread has one of the others."""


class Slots:
    """Numbers of the episodes whose code runs at this moment; 0 where none does."""

    def __init__(self, descriptor: int, count: int) -> None:
        """descriptor: of a file, which both processes map."""
        size = count * _NUMBER_BYTES
        if os.fstat(descriptor).st_size < size:
            os.truncate(descriptor, size)
        self._numbers = memoryview(mmap.mmap(descriptor, size)).cast("q")

    @contextmanager
    def running(self, slot: int, episode: int) -> Iterator[None]:
        """Mark the episode while the block runs."""
        if slot >= len(self._numbers):
            yield
            return
        before, self._numbers[slot] = self._numbers[slot], episode
        try:
            yield
        finally:
            self._numbers[slot] = before

    def read(self) -> set[int]:
        """The episodes. The process may have written anything."""
        return {number for number in self._numbers if number}

    def close(self) -> None:
        self._numbers.release()
