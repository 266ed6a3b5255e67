"""Read a user's data loader repeatedly: endlessly, for a number of passes, or for a number of batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from itertools import chain, count, islice
from typing import Generic, TypeVar

from rlhf_core.errors import DataError

B = TypeVar("B")


class CycledLoader(Generic[B]):
    """Endless loader. It restarts the given loader at its end, so a shuffling loader reshuffles.

    Example:
        >>> loader = CycledLoader(["a", "b"], where="prompt_dataloader", skip=1)
        >>> [next(loader) for _ in range(3)], loader.num_taken
        (['b', 'a', 'b'], 4)
    """

    def __init__(self, loader: Iterable[B], *, where: str, skip: int = 0) -> None:
        """Start reading after `skip` batches.

        Args:
            loader: Iterable that can be read repeatedly.
            where: Name of the loader in error messages.
            skip: Number of batches to skip, namely those consumed before a resume.
        """
        self._batches = chain.from_iterable(_one_pass(loader, where, number) for number in count())
        self.num_taken = 0
        length = len(loader) if isinstance(loader, Sized) else 0
        for _ in range(skip % length if length else skip):
            next(self)
        self.num_taken = skip

    def __iter__(self) -> CycledLoader[B]:
        return self

    def __next__(self) -> B:
        """Raise `DataError` if the loader is empty."""
        batch = next(self._batches)
        self.num_taken += 1
        return batch


def batches_of(loader: Iterable[B], num_epochs: int, num_steps: int, *, where: str) -> Iterator[B]:
    """Yield the batches of `num_epochs` passes, or exactly `num_steps` batches if `num_steps` > 0.

    Args:
        loader: Iterable that can be read repeatedly.
        num_epochs: Number of passes. Ignored if `num_steps` > 0.
        num_steps: Number of batches, taken from as many passes as needed. 0 means unset.
        where: Name of the loader in error messages.

    Yields:
        Batches of the loader, unchanged.

    Example:
        >>> list(batches_of(["a", "b"], num_epochs=1, num_steps=3, where="dataloader"))
        ['a', 'b', 'a']
    """
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
        raise DataError("yields no batches", where=where, hint="is the dataset empty, or smaller than one batch?")
    if empty:
        raise DataError(
            "yields no batches on the second pass",
            where=where,
            hint="pass an iterable that can be read repeatedly, not an iterator",
        )
