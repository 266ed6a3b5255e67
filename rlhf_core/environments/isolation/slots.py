"""Who is being run in the process of environments, in memory that it shares with the run: known also after a crash."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager

_NUMBER = struct.Struct("@q")
LOOP = 0
"""The slot of the event loop; each thread has one of the others."""


class Slots:
    """Numbers of the episodes whose code runs at this moment; 0 where none does."""

    def __init__(self, descriptor: int, count: int) -> None:
        """descriptor: of a file, which both processes map."""
        if os.fstat(descriptor).st_size < count * _NUMBER.size:
            os.truncate(descriptor, count * _NUMBER.size)
        self._count = count
        self._memory = mmap.mmap(descriptor, count * _NUMBER.size)

    @contextmanager
    def running(self, slot: int, episode: int) -> Iterator[None]:
        """Mark the episode while the block runs."""
        before = self._set(slot, episode)
        try:
            yield
        finally:
            self._set(slot, before)

    def _set(self, slot: int, episode: int) -> int:
        if slot >= self._count:
            return 0
        (before,) = _NUMBER.unpack_from(self._memory, slot * _NUMBER.size)
        _NUMBER.pack_into(self._memory, slot * _NUMBER.size, episode)
        return int(before)

    def read(self) -> set[int]:
        """The episodes. The process may have written anything."""
        return {number for (number,) in _NUMBER.iter_unpack(self._memory) if number}

    def close(self) -> None:
        self._memory.close()
