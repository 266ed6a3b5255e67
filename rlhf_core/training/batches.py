"""An episode's global batches, which are the same samples for any number of ranks, and each rank's part of them.

Units, items that must share a forward pass, are dealt to ranks and micro-batches by price.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, groupby
from typing import Any, ClassVar, TypeVar

from ..batching import balanced, plan_micro_batches
from ..errors import PluginError
from ..models.forward_passes import ForwardPasses
from ..plugins.errors_of import errors_of
from ..types import BufferItem, ItemSummary

ItemT = TypeVar("ItemT")
Rows = Sequence[Any]
"""Items that must be in the same update: the rows of an episode that branched, or a sample's one item."""


@dataclass(frozen=True, slots=True)
class Units:
    """The units of an algorithm, and what a forward over them costs."""

    split: Callable[[Sequence[Any]], Sequence[Sequence[Any]]] = lambda items: [[item] for item in items]
    """`Algorithm.units`."""
    price: Callable[[Sequence[Any]], int] = ForwardPasses().price
    """`ForwardPasses.price`."""
    plugin: str | None = None
    """The label of the algorithm, for errors."""

    def places(self, items: Sequence[Any]) -> list[list[int]]:
        """The units, as indices into `items`. Raises `PluginError` unless each item is in one of them."""
        with errors_of(self.plugin, "units"):
            units = [list(unit) for unit in self.split(items)]
        if not all(units) or Counter(map(id, items)) != Counter(map(id, chain.from_iterable(units))):
            raise PluginError(
                f"its units do not have each of the {len(items)} items once, in units of at least one item",
                where=self.plugin or self.split.__module__,
                hint="return the items that were given, grouped",
            )
        left: dict[int, list[int]] = {}
        for place in reversed(range(len(items))):
            left.setdefault(id(items[place]), []).append(place)
        return [[left[id(item)].pop() for item in unit] for unit in units]

    def linked(self, samples: Sequence[Rows]) -> list[tuple[list[int], int]]:
        """The samples that units hold together, as indices in order, and the price of each group, by its first one."""
        sample_of = [index for index, rows in enumerate(samples) for _ in rows]
        items = list(chain.from_iterable(samples))
        groups, prices = {index: [index] for index in range(len(samples))}, [0] * len(samples)
        for unit in self.places(items):
            firsts = {groups[sample_of[place]][0] for place in unit}
            group = sorted(chain.from_iterable(groups[first] for first in firsts))
            groups.update(dict.fromkeys(group, group))
            prices[group[0]] = sum(prices[first] for first in firsts) + self.price([items[place] for place in unit])
        return [(group, prices[index]) for index, group in groups.items() if group[0] == index]

    def micro_batches(self, items: Sequence[Any], max_tokens: int | None) -> list[list[int]]:
        """Whole units, as indices into `items`, by `plan_micro_batches`."""
        units = self.places(items)

        def price(chosen: Sequence[list[int]]) -> int:
            return self.price([items[place] for unit in chosen for place in unit])

        plans = plan_micro_batches(units, max_tokens, price)
        return [[place for unit in plan for place in units[unit]] for plan in plans]


def filled(
    passes: Sequence[Sequence[Sequence[int]]], items: Mapping[int, ItemT], filler: ItemT
) -> list[list[list[ItemT]]]:
    """The items of `BatchPlan.rows`; the filler, which counts for nothing, in a batch without any."""
    return [[[items[row] for row in batch] or [filler] for batch in batches] for batches in passes]


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
    mixes_ranks: ClassVar[bool] = False
    """Whether a row may be trained on by one rank in a pass and by another in the next."""

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

    def rows(self, samples: Sequence[Rows]) -> list[list[list[int]]]:
        """For each pass and batch, the rows that this rank trains on, numbered over all samples; it may have none."""
        ends = list(accumulate(map(len, samples), initial=0))
        return [
            [
                [row for index in self.shares(samples, batch)[self.rank] for row in range(ends[index], ends[index + 1])]
                for batch in batches
            ]
            for batches in self.passes(samples)
        ]
