"""An episode's global batches, which are the same samples for any number of ranks, and each rank's part of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import Any

from ..batching import balanced
from ..types import BufferItem, ItemSummary
from .units import Rows, Units


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """This rank's part of one global training batch; at least one item, which may be a masked filler."""

    items: Sequence[Any]
    gap_version: int | None = None
    """Policy version of the trainer's weights; set only on an episode's first batch, before they change."""


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
    units: Units = field(default_factory=Units)

    def passes(self, samples: Sequence[Rows]) -> Iterator[list[Sequence[int]]]:
        """For each pass its batches, as indices of samples in their order.

        The last batch of a pass may be smaller, and one that has no room for all samples of the next unit.
        """
        batches: list[list[int]] = []
        for group, _ in self.units.linked(samples):
            if not batches or len(batches[-1]) + len(group) > self.train_batch_size:
                batches.append([])
            batches[-1] += group
        for _ in range(self.epochs_per_episode):
            yield [sorted(batch) for batch in batches]

    def shares(self, samples: Sequence[Rows], batch: Sequence[int]) -> list[list[int]]:
        """The samples of a batch that each rank trains on, of about the same price."""
        groups, prices = zip(*self.units.linked([samples[index] for index in batch]), strict=True)
        parts = ([groups[each] for each in part] for part in balanced(prices, self.world_size))
        return [[batch[place] for place in sorted(chain.from_iterable(part))] for part in parts]

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
