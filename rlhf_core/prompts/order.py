"""The order of training records: a pure function of seed and position, so that any process can tell it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..errors import DataError
from ..util.rng import permutation, prompt_order

_BLOCK = 1000
"""Positions among which the weights of a mixture hold exactly, up to rounding."""
_KEPT = 4
"""Shuffled epochs and blocks kept for each part: several makers read on both sides of a border."""


@dataclass(frozen=True, slots=True)
class Part:
    """One source of a mixture."""

    name: str
    size: int
    """Records."""
    weight: float


@dataclass(slots=True)
class RecordOrder:
    """Endless: every part's records are shuffled anew in each of its epochs, and parts take turns by their weights.

    A weight is a share of the positions: a small source with a large weight repeats more often.
    """

    seed: int
    parts: Sequence[tuple[float, Sequence[int]]]
    """Weight and records (indices in the source) of each part."""
    _kept: dict[tuple[int, int], array[int]] = field(default_factory=dict, repr=False)

    def index(self, position: int) -> int:
        """Index in the source of the record at `position` (>= 0)."""
        if len(self.parts) == 1:
            records = self.parts[0][1]
            epoch, place = divmod(position, len(records))
            return records[self._epoch(0, epoch)[place]]
        block, place = divmod(position, _BLOCK)
        slots = self._slots()
        part, turn = divmod(self._block(block, slots)[place], _BLOCK)
        records = self.parts[part][1]
        epoch, place = divmod(block * slots[part] + turn, len(records))
        return records[self._epoch(part, epoch)[place]]

    def _epoch(self, part: int, epoch: int) -> array[int]:
        count = len(self.parts[part][1])
        if len(self.parts) == 1:
            return self._remember((part, epoch), lambda: prompt_order(count, self.seed, epoch))
        return self._remember((part, epoch), lambda: permutation(count, self.seed, "mixture-part", part, epoch))

    def _block(self, block: int, slots: Sequence[int]) -> array[int]:
        """For each place of a block: part x 1000 + how many places of that part come before it in the block."""

        def make() -> list[int]:
            owners = [part for part, count in enumerate(slots) for _ in range(count)]
            turns = [0] * len(slots)
            made = []
            for place in permutation(_BLOCK, self.seed, "mixture", block):
                part = owners[place]
                made.append(part * _BLOCK + turns[part])
                turns[part] += 1
            return made

        return self._remember((-1, block), make)

    def _slots(self) -> list[int]:
        """Places of each part in a block, by largest remainder."""
        total = sum(weight for weight, _ in self.parts)
        exact = [_BLOCK * weight / total for weight, _ in self.parts]
        slots = [int(each) for each in exact]
        by_remainder = sorted(range(len(slots)), key=lambda part: slots[part] - exact[part])
        for part in by_remainder[: _BLOCK - sum(slots)]:
            slots[part] += 1
        return slots

    def _remember(self, key: tuple[int, int], make: Callable[[], Sequence[int]]) -> array[int]:
        found = self._kept.get(key)
        if found is None:
            found = self._kept[key] = array("q", make())
            same = [each for each in self._kept if each[0] == key[0]]
            for old in same[:-_KEPT]:
                del self._kept[old]
        return found


def order_of(training: Sequence[int], parts: Sequence[Part], seed: int) -> RecordOrder:
    """The order of `training` records (sorted indices) of a source that consists of `parts`, one after the other.

    Raises `DataError` for a part none of whose records is left.
    """
    if not parts:
        return RecordOrder(seed, [(1.0, training)])
    divided: list[tuple[float, Sequence[int]]] = []
    start = 0
    for part in parts:
        own = array("q", (index for index in training if start <= index < start + part.size))
        if not own:
            raise DataError("none of its records is left to train on", where=f"prompts.sources: {part.name}")
        divided.append((part.weight, own))
        start += part.size
    return RecordOrder(seed, divided)
