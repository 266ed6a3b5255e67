"""An episode's global batches, which are the same for any number of ranks, and each rank's part of them.

Units (items that must share a forward pass) are distributed to ranks and micro-batches by price.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, groupby
from typing import Any, ClassVar, TypeVar

from ..batching import balanced
from ..errors import PluginError
from ..models.forward_passes import ForwardPasses
from ..plugins.errors_of import errors_of
from ..types import BufferItem, ItemSummary

ItemT = TypeVar("ItemT")
Rows = Sequence[Any]
"""Items that must be in the same update: a sample's single item, or all rows of an episode that branched."""


@dataclass(frozen=True, slots=True)
class Units:
    """The units of an algorithm, and the cost of a forward pass over them."""

    split: Callable[[Sequence[Any]], Sequence[Sequence[Any]]] = lambda items: [[item] for item in items]
    """`Algorithm.units`."""
    price: Callable[[Sequence[Any]], int] = ForwardPasses().price
    """`ForwardPasses.price`."""
    plugin: str | None = None
    """Label of the algorithm, for errors."""

    def places(self, items: Sequence[Any]) -> list[list[int]]:
        """Units as indices into `items`. Raises `PluginError` unless each item is in exactly one unit."""
        with errors_of(self.plugin, "units"):
            units = [list(unit) for unit in self.split(items)]
        if not all(units) or Counter(map(id, items)) != Counter(map(id, chain.from_iterable(units))):
            raise PluginError(
                f"its units do not contain each of the {len(items)} items exactly once, or a unit is empty",
                where=self.plugin or self.split.__module__,
                hint="return the items of the argument, grouped",
            )
        places: dict[int, list[int]] = {}
        for place in reversed(range(len(items))):
            places.setdefault(id(items[place]), []).append(place)
        return [[places[id(item)].pop() for item in unit] for unit in units]

    def linked(self, samples: Sequence[Rows]) -> list[tuple[list[int], int]]:
        """Groups of samples that share units, as sorted indices with the group's price, ordered by first sample."""
        sample_of = [index for index, rows in enumerate(samples) for _ in rows]
        items = list(chain.from_iterable(samples))
        groups, prices = {index: [index] for index in range(len(samples))}, [0] * len(samples)
        for unit in self.places(items):
            firsts = {groups[sample_of[place]][0] for place in unit}
            group = sorted(chain.from_iterable(groups[first] for first in firsts))
            groups.update(dict.fromkeys(group, group))
            prices[group[0]] = sum(prices[first] for first in firsts) + self.price([items[place] for place in unit])
        return [(group, prices[index]) for index, group in groups.items() if group[0] == index]

    def micro_batches(self, items: Sequence[Any], plan: Callable[[Rows], Sequence[Sequence[int]]]) -> list[list[int]]:
        """Micro-batches of whole units, as indices into `items`. `plan`: units -> indices of those of each batch."""
        units = self.places(items)
        plans = plan([[items[place] for place in unit] for unit in units])
        return [[place for unit in batch for place in units[unit]] for batch in plans]


def filled(
    passes: Sequence[Sequence[Sequence[int]]], items: Mapping[int, ItemT], filler: ItemT
) -> list[list[list[ItemT]]]:
    """Items of `BatchPlan.rows`, with the masked `filler` in batches that are empty on this rank."""
    return [[[items[row] for row in batch] or [filler] for batch in batches] for batches in passes]


def rows_of_samples(items: Sequence[BufferItem | ItemSummary]) -> list[Rows]:
    """Group items (or their summaries), sorted by `sample_id` and `branch`, into samples."""
    return [list(rows) for _, rows in groupby(items, key=lambda item: item.sample_id)]


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The split of an episode into passes, batches, and this rank's part of each batch."""

    train_batch_size: int
    """Samples of a global batch."""
    epochs_per_episode: int
    """Passes over an episode."""
    rank: int
    """Index of this rank."""
    world_size: int
    """Number of ranks."""
    units: Units = field(default_factory=Units)
    """Items that share a rank and a forward pass."""
    mixes_ranks: ClassVar[bool] = False
    """Whether different ranks may train on the same row in different passes."""

    def passes(self, samples: Sequence[Rows]) -> Iterator[list[Sequence[int]]]:
        """Yield the batches of each pass, as sorted indices of samples.

        A batch is smaller than `train_batch_size` if it is the last one, or if the next unit does not fit.
        """
        batches: list[list[int]] = []
        for group, _ in self.units.linked(samples):
            if not batches or len(batches[-1]) + len(group) > self.train_batch_size:
                batches.append([])
            batches[-1] += group
        for _ in range(self.epochs_per_episode):
            yield [sorted(batch) for batch in batches]

    def shares(self, samples: Sequence[Rows], batch: Sequence[int]) -> list[list[int]]:
        """Samples of a batch that each rank trains on, with about equal prices."""
        groups, prices = zip(*self.units.linked([samples[index] for index in batch]), strict=True)
        parts = ([groups[each] for each in part] for part in balanced(prices, self.world_size))
        return [[batch[place] for place in sorted(chain.from_iterable(part))] for part in parts]

    def rows(self, samples: Sequence[Rows]) -> list[list[list[int]]]:
        """Rows that this rank trains on in each pass and batch, numbered over all samples. May be empty for a batch."""
        ends = list(accumulate(map(len, samples), initial=0))
        return [
            [
                [row for index in self.shares(samples, batch)[self.rank] for row in range(ends[index], ends[index + 1])]
                for batch in batches
            ]
            for batches in self.passes(samples)
        ]
