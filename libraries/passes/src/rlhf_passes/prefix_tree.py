"""Beginnings that rows have in common, as a tree whose tokens are laid out once."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

MIN_SAVED = 16
"""Minimum number of tokens that a shared beginning saves. Below it the additional calls take longer."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Adjacent tokens of the layout with the same rows. The segments of its continuations follow it."""

    start: int
    stop: int
    """End of the tokens of the segment, and start of its first continuation."""
    end: int
    """End of its last continuation. Tokens before it and from `stop` attend to all tokens of the segment."""


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """The layout of B rows in T tokens, with each shared beginning laid out once.

    Example:
        >>> rows = np.array([[7, 8, 9, 1], [7, 8, 9, 2], [5, 6, 0, 0]])
        >>> tree = PrefixTree.of(rows, [4, 4, 2], min_saved=3)
        >>> tree.sources.tolist(), tree.places.tolist()
        ([8, 9, 0, 1, 2, 3, 7], [[2, 3, 4, 5], [2, 3, 4, 6], [0, 1, 0, 0]])
    """

    sources: NDArray[np.int64]
    """[T]: index of a token in the flattened rows."""
    places: NDArray[np.int64]
    """[B, W]: place of each token in the layout, 0 on padding."""
    segments: Sequence[Segment]
    """Segments that are not empty, in order of `start`."""

    @classmethod
    def of(cls, ids: NDArray[np.int64], lengths: Sequence[int], *, min_saved: int = MIN_SAVED) -> PrefixTree:
        """Create the layout of rows.

        Args:
            ids: [B, W] tokens, padded on the right.
            lengths: Number of tokens of each row.
            min_saved: Minimum number of tokens that a shared beginning saves.
        """
        order = sorted(range(len(ids)), key=lambda row: ids[row, : lengths[row]].astype(">i8").tobytes())
        builder = _Builder(order, lengths, _common(ids, lengths, order), ids.shape, min_saved)
        builder.lay_out()
        return cls(np.concatenate(builder.sources), builder.places, sorted(builder.segments, key=lambda s: s.start))


def num_shared_tokens(ids: NDArray[np.int64], lengths: Sequence[int]) -> int:
    """Number of tokens of a `PrefixTree`, at most the sum of the lengths."""
    return len(PrefixTree.of(ids, lengths).sources)


def _common(ids: NDArray[np.int64], lengths: Sequence[int], order: Sequence[int]) -> NDArray[np.int64]:
    """[B]: number of first tokens that a row has in common with the previous one in `order`, 0 for the first row."""
    rows, counts = ids[order], np.asarray(lengths)[order]
    differs = rows[1:] != rows[:-1]
    first = np.where(differs.any(1), differs.argmax(1), ids.shape[1])
    return np.concatenate([[0], np.minimum(first, np.minimum(counts[1:], counts[:-1]))])


class _Builder:
    """Lays out sorted rows depth first."""

    def __init__(
        self,
        order: Sequence[int],
        lengths: Sequence[int],
        common: NDArray[np.int64],
        shape: tuple[int, ...],
        min_saved: int,
    ) -> None:
        self._order, self._lengths, self._common, self._min_saved = order, lengths, common, min_saved
        self.places = np.zeros(shape, dtype=np.int64)
        self.sources: list[NDArray[np.int64]] = []
        self.segments: list[Segment] = []
        self._size = 0

    def lay_out(self) -> None:
        """Lay out all rows. Without recursion: similar rows can be a tree as deep as their number."""
        tasks: list[tuple[int, int, int] | tuple[int, int]] = [(0, len(self._order), 0)]
        while tasks:
            task = tasks.pop()
            if len(task) == 2:  # a shared segment whose continuations are complete
                self.segments.append(Segment(*task, self._size))
            else:
                tasks += reversed(self._continuations(*task))

    def _continuations(self, first: int, last: int, start: int) -> list[tuple[int, int, int] | tuple[int, int]]:
        """Lay out the common tokens of sorted rows from the column `start`. Return further tasks.

        `first` to `last` (exclusive) are places in the order of rows.
        """
        if last - first == 1:
            self._add(first, last, start, self._lengths[self._order[first]])
            return []
        inner = self._common[first + 1 : last]
        stop = int(inner.min())
        cuts = [first, *(first + 1 + np.flatnonzero(inner == stop)).tolist(), last]
        if (stop - start) * (last - first - 1) < self._min_saved:
            return [(one, other, start) for one, other in pairwise(cuts)]
        place = self._size
        self._add(first, last, start, stop)
        return [*((one, other, stop) for one, other in pairwise(cuts)), (place, self._size)]

    def _add(self, first: int, last: int, start: int, stop: int) -> None:
        """Add the columns `start` to `stop` of the first row, which the other rows share."""
        if start == stop:
            return
        rows, width = self._order[first:last], self.places.shape[1]
        self.places[rows, start:stop] = np.arange(self._size, self._size + stop - start)
        self.sources.append(np.arange(rows[0] * width + start, rows[0] * width + stop))
        self._size += stop - start
        if last - first == 1:
            self.segments.append(Segment(self._size - (stop - start), self._size, self._size))
