"""Reads a user's data loader repeatedly: endlessly, for some passes, or for some batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from itertools import chain, count, islice
from typing import Generic, TypeVar

from rlhf_core.errors import DataError

B = TypeVar("B")


class CycledLoader(Generic[B]):
    """An endless loader: restarts at its end, so a shuffling loader reshuffles."""

    def __init__(self, loader: Iterable[B], *, where: str, skip: int = 0) -> None:
        """`skip`: number of batches to skip, those taken before a resume."""
        self._batches = chain.from_iterable(_one_pass(loader, where, number) for number in count())
        self.num_taken = 0
        length = len(loader) if isinstance(loader, Sized) else 0
        for _ in range(skip % length if length else skip):
            next(self)
        self.num_taken = skip

    def __iter__(self) -> CycledLoader[B]:
        return self

    def __next__(self) -> B:
        """Raises `DataError` when the loader is empty."""
        batch = next(self._batches)
        self.num_taken += 1
        return batch


def batches_of(loader: Iterable[B], num_epochs: int, num_steps: int, *, where: str) -> Iterator[B]:
    """`num_epochs` passes over a loader, or, with `num_steps` > 0, that many batches in as many passes as needed."""
    if num_steps > 0:
        yield from islice(CycledLoader(loader, where=where), num_steps)
    else:
        for number in range(num_epochs):
            yield from _one_pass(loader, where, number)


def _one_pass(loader: Iterable[B], where: str, number: int) -> Iterator[B]:
    empty = True
    for batch in loader:
        empty = False
        yield batch
    if empty and number == 0:
        raise DataError("gives no batch", where=where, hint="is the dataset empty, or drop_last larger than it?")
    if empty:
        raise DataError(
            "gives no batch the second time it is read",
            where=where,
            hint="give something that can be read again, not an iterator",
        )
