"""A user's data loader, read more than once: without end, for some passes, or for some batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from itertools import chain, count, islice
from typing import Generic, TypeVar

from ..errors import DataError

B = TypeVar("B")


class CycledLoader(Generic[B]):
    """A loader without end: at its end it starts again, so a shuffling one shuffles anew."""

    def __init__(self, loader: Iterable[B], *, where: str, skip: int = 0) -> None:
        """`skip`: batches that were taken before a resume; as many are passed over here."""
        self._batches = chain.from_iterable(_one_pass(loader, where, number) for number in count())
        self.num_taken = 0
        length = len(loader) if isinstance(loader, Sized) else 0
        for _ in range(skip % length if length else skip):
            next(self)
        self.num_taken = skip

    def __iter__(self) -> CycledLoader[B]:
        return self

    def __next__(self) -> B:
        """Raises `DataError` when the loader has nothing to give."""
        batch = next(self._batches)
        self.num_taken += 1
        return batch


def batches_of(loader: Iterable[B], num_epochs: int, num_steps: int, *, where: str) -> Iterator[B]:
    """`num_epochs` passes over a loader, or, with `num_steps` > 0, so many batches of as many passes as that takes."""
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
