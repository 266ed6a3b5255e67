"""Whole batches of samples in the order of their arrival; `replay_buffer.py` makes it an actor."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from rlhf_core.errors import DeadlineError, RlhfError

T = TypeVar("T")


class BatchBuffer(Generic[T]):
    """Forms whole batches of `batch_size` entries in arrival order; thread-safe.

    Nothing is ever dropped: with `limit` > 0, a producer blocks while `limit` whole batches wait (back-pressure).
    Entries that do not fill a batch yet wait for the next ones.
    """

    def __init__(self, batch_size: int, limit: int = 0, entries: Iterable[T] = ()) -> None:
        """`limit` of 0 or less means no limit. `entries` are the initial content, in any number."""
        if batch_size < 1:
            raise ValueError(f"batch_size must be >= 1, got {batch_size}")
        self._batch_size = batch_size
        self._limit = limit
        self._entries: deque[T] = deque(entries)
        self._changed = threading.Condition()
        self._drained: str | None = None

    def __len__(self) -> int:
        """Whole batches waiting."""
        return len(self._entries) // self._batch_size

    def put(self, entries: Iterable[T], *, timeout_seconds: float) -> None:
        """Append all entries. Raises `DeadlineError` when the buffer stays full; the rest is then not taken."""
        deadline = time.monotonic() + timeout_seconds
        for entry in entries:
            with self._changed:
                while 0 < self._limit <= len(self):
                    self._wait(deadline, f"room in the replay buffer ({len(self)} of {self._limit} batches wait)")
                self._check()
                self._entries.append(entry)
                self._changed.notify_all()

    def get(self, *, timeout_seconds: float) -> list[T]:
        """Remove and return one whole batch. Raises `DeadlineError`, or `RlhfError` once drained."""
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            while len(self) == 0:
                self._wait(deadline, f"a batch ({len(self._entries)} of {self._batch_size} entries are there)")
            batch = [self._entries.popleft() for _ in range(self._batch_size)]
            self._changed.notify_all()
            return batch

    def give_back(self, entries: Sequence[T]) -> None:
        """Put a batch that `get` returned in front again, also beyond `limit`: its taker could not use it."""
        with self._changed:
            self._entries.extendleft(reversed(entries))
            self._changed.notify_all()

    def drain(self, reason: str) -> list[T]:
        """Remove and return all entries, to continue with them elsewhere; other calls fail from now on."""
        with self._changed:
            self._drained = reason
            entries = list(self._entries)
            self._entries.clear()
            self._changed.notify_all()
            return entries

    def clear(self) -> None:
        with self._changed:
            self._entries.clear()
            self._changed.notify_all()

    def _wait(self, deadline: float, what: str) -> None:
        self._check()
        remaining = deadline - time.monotonic()
        if remaining <= 0 or not self._changed.wait(remaining):
            raise DeadlineError(f"waited for {what}", where="replay buffer")

    def _check(self) -> None:
        if self._drained is not None:
            raise RlhfError(f"the replay buffer is closed: {self._drained}", where="replay buffer")
