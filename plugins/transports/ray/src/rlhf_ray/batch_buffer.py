"""Whole batches of samples in the order of their arrival; `replay_buffer.py` makes it an actor."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from rlhf_core.errors import DeadlineError

T = TypeVar("T")


class BatchBuffer(Generic[T]):
    """Forms whole batches of `batch_size` entries in arrival order; thread-safe.

    Nothing is ever dropped: with `limit` > 0, a producer blocks while `limit` whole batches wait (back-pressure).
    Entries that do not fill a batch yet wait for the next ones.
    """

    def __init__(self, batch_size: int, limit: int = 0) -> None:
        """`limit` of 0 or less means no limit."""
        self._batch_size = batch_size
        self._limit = limit
        self._entries: deque[T] = deque()
        self._changed = threading.Condition()

    def num_batches(self) -> int:
        """Whole batches waiting."""
        return len(self._entries) // self._batch_size

    def put(self, entries: Iterable[T], *, timeout_seconds: float) -> None:
        """Append all entries. Raises `DeadlineError` when the buffer stays full; the rest is then not taken."""
        deadline = time.monotonic() + timeout_seconds
        for entry in entries:
            with self._changed:
                while 0 < self._limit <= (waiting := self.num_batches()):
                    self._wait(deadline, f"room in the replay buffer ({waiting} of {self._limit} batches wait)")
                self._entries.append(entry)
                self._changed.notify_all()

    def get(self, *, timeout_seconds: float) -> list[T]:
        """Remove and return one whole batch. Raises `DeadlineError`."""
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            while not self.num_batches():
                self._wait(deadline, f"a batch ({len(self._entries)} of {self._batch_size} entries are there)")
            batch = [self._entries.popleft() for _ in range(self._batch_size)]
            self._changed.notify_all()
            return batch

    def give_back(self, entries: Sequence[T]) -> None:
        """Put a batch that `get` returned in front again, also beyond `limit`: its taker could not use it."""
        with self._changed:
            self._entries.extendleft(reversed(entries))
            self._changed.notify_all()

    def clear(self) -> None:
        with self._changed:
            self._entries.clear()
            self._changed.notify_all()

    def _wait(self, deadline: float, what: str) -> None:
        remaining = deadline - time.monotonic()
        if remaining <= 0 or not self._changed.wait(remaining):
            raise DeadlineError(f"waited for {what}", where="replay buffer")
