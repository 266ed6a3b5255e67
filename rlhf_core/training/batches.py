"""An episode's global batches, which are the same samples for any number of ranks, and each rank's part of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from ..batching import balanced
from ..types import BufferItem, ItemSummary


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """This rank's part of one global training batch; at least one item, which may be a masked filler."""

    items: Sequence[Any]
    gap_version: int | None = None
    """Policy version of the trainer's weights; set only on an episode's first batch, before they change."""


Rows = Sequence[Any]
"""Items that must be in the same update: the rows of an episode that branched, or a sample's one item."""


def rows_of_samples(items: Sequence[BufferItem | ItemSummary]) -> list[Rows]:
    """Items, or their summaries, in order of `sample_id` and `branch`, grouped into samples."""
    return [list(rows) for _, rows in groupby(items, key=lambda item: item.sample_id)]


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """How an episode is split: global sizes, and this rank."""

    train_batch_size: int
    epochs_per_episode: int
    rank: int
    world_size: int

    def passes(self, samples: Sequence[Rows]) -> Iterator[list[Sequence[int]]]:
        """For each pass its batches, as indices of samples in their order; the last batch of a pass may be smaller."""
        size, every = self.train_batch_size, range(len(samples))
        for _ in range(self.epochs_per_episode):
            yield [every[start : start + size] for start in range(0, len(samples), size)]

    def shares(self, samples: Sequence[Rows], batch: Sequence[int]) -> list[list[int]]:
        """The samples of a batch that each rank trains on, of about as many tokens."""
        lengths = [sum(row.num_tokens for row in samples[index]) for index in batch]
        return [[batch[place] for place in part] for part in balanced(lengths, self.world_size)]

    def batches(
        self, samples: Sequence[Rows], masked: Callable[[Any], Any], gap_version: int | None
    ) -> Iterator[Iterator[TrainBatch]]:
        """This rank's part of each batch, pass by pass; a masked filler where it has none."""
        for number, batches in enumerate(self.passes(samples)):
            yield self._pass(samples, batches, masked, gap_version if number == 0 else None)

    def _pass(
        self, samples: Sequence[Rows], batches: list[Sequence[int]], masked: Callable[[Any], Any], version: int | None
    ) -> Iterator[TrainBatch]:
        for number, batch in enumerate(batches):
            mine = [row for index in self.shares(samples, batch)[self.rank] for row in samples[index]]
            yield TrainBatch(mine or [masked(samples[batch[0]][0])], version if number == 0 else None)
