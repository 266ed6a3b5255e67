"""Whole batches of samples in arrival order. `replay_buffer.py` runs this buffer as an actor."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from rlhf_core.errors import DeadlineError

T = TypeVar("T")


class BatchBuffer(Generic[T]):
    """Forms whole batches of `batch_size` entries in arrival order. Thread-safe.

    Nothing is ever dropped: with `limit` > 0, a producer blocks while `limit` whole batches wait (back-pressure).
    Entries of an incomplete batch wait for more entries.

    Example:
        >>> buffer = BatchBuffer(batch_size=2)
        >>> buffer.put(["a", "b", "c"], timeout_seconds=1.0)
        >>> buffer.get(timeout_seconds=1.0), buffer.num_batches()
        (['a', 'b'], 0)
    """

    def __init__(self, batch_size: int, limit: int = 0) -> None:
        """Create an empty buffer. A `limit` of 0 or less means no limit."""
        self._batch_size = batch_size
        self._limit = limit
        self._entries: deque[T] = deque()
        self._changed = threading.Condition()

    def num_batches(self) -> int:
        """Number of whole batches in the buffer."""
        return len(self._entries) // self._batch_size

    def put(self, entries: Iterable[T], *, timeout_seconds: float) -> None:
        """Append all entries. Raises `DeadlineError`, without adding the remaining ones, if the buffer stays full."""
        deadline = time.monotonic() + timeout_seconds
        for entry in entries:
            with self._changed:
                while 0 < self._limit <= (waiting := self.num_batches()):
                    self._wait(deadline, f"room in the replay buffer ({waiting} of {self._limit} batches wait)")
                self._entries.append(entry)
                self._changed.notify_all()

    def get(self, *, timeout_seconds: float) -> list[T]:
        """Remove and return one whole batch. Raises `DeadlineError` if none is complete in time."""
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            while not self.num_batches():
                self._wait(deadline, f"a batch ({len(self._entries)} of {self._batch_size} entries have arrived)")
            batch = [self._entries.popleft() for _ in range(self._batch_size)]
            self._changed.notify_all()
            return batch

    def give_back(self, entries: Sequence[T]) -> None:
        """Put a batch returned by `get` back at the front, even beyond `limit`, if its receiver could not use it."""
        with self._changed:
            self._entries.extendleft(reversed(entries))
            self._changed.notify_all()

    def clear(self) -> None:
        with self._changed:
            self._entries.clear()
            self._changed.notify_all()

    def _wait(self, deadline: float, awaited: str) -> None:
        remaining = deadline - time.monotonic()
        if remaining <= 0 or not self._changed.wait(remaining):
            raise DeadlineError(f"waited for {awaited}", where="replay buffer")
