"""The order of training records: a pure function of seed and position, so that any process can tell it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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


class Remembered:
    """The newest few arrays by key, which are made again where they are gone."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], array[int]] = {}

    def get(self, key: tuple[int, int], make: Callable[[], Sequence[int]]) -> array[int]:
        """That of a key; of those that begin with the same number a few are kept."""
        found = self._kept.get(key)
        if found is None:
            found = self._kept[key] = array("q", make())
            same = [each for each in self._kept if each[0] == key[0]]
            for old in same[:-_KEPT]:
                del self._kept[old]
        return found


class Turns:
    """How parts take turns by their weights: each has its share of every 1,000 positions."""

    def __init__(self, seed: int, weights: Sequence[float]) -> None:
        self._seed = seed
        self._slots = shares(weights, _BLOCK)
        self._kept = Remembered()

    def at(self, position: int) -> tuple[int, int]:
        """The part whose turn a position (>= 0) is, and how many turns it had before."""
        block, place = divmod(position, _BLOCK)
        part, turn = divmod(self._block(block)[place], _BLOCK)
        return part, block * self._slots[part] + turn

    def _block(self, block: int) -> array[int]:
        """For each place of a block: part x 1000 + how many places of that part come before it in the block."""

        def make() -> list[int]:
            owners = [part for part, count in enumerate(self._slots) for _ in range(count)]
            turns = [0] * len(self._slots)
            made = []
            for place in permutation(_BLOCK, self._seed, "mixture", block):
                part = owners[place]
                made.append(part * _BLOCK + turns[part])
                turns[part] += 1
            return made

        return self._kept.get((-1, block), make)


def shares(weights: Sequence[float], total: int) -> list[int]:
    """`total` divided by weights, by largest remainder."""
    whole = sum(weights)
    exact = [total * weight / whole for weight in weights]
    found = [int(each) for each in exact]
    by_remainder = sorted(range(len(found)), key=lambda part: found[part] - exact[part])
    for part in by_remainder[: total - sum(found)]:
        found[part] += 1
    return found


class RecordOrder:
    """Endless: every part's records are shuffled anew in each of its epochs, and parts take turns by their weights.

    A weight is a share of the positions: a small source with a large weight repeats more often.
    """

    def __init__(self, seed: int, parts: Sequence[tuple[float, Sequence[int]]]) -> None:
        """parts: weight and records (indices in the source) of each."""
        self._seed = seed
        self._records = [records for _, records in parts]
        self._turns = Turns(seed, [weight for weight, _ in parts]) if len(parts) > 1 else None
        self._kept = Remembered()

    def index(self, position: int) -> int:
        """Index in the source of the record at `position` (>= 0)."""
        part, turn = (0, position) if self._turns is None else self._turns.at(position)
        records = self._records[part]
        epoch, place = divmod(turn, len(records))
        return records[self._epoch(part, epoch)[place]]

    def _epoch(self, part: int, epoch: int) -> array[int]:
        count = len(self._records[part])
        if self._turns is None:
            return self._kept.get((part, epoch), lambda: prompt_order(count, self._seed, epoch))
        return self._kept.get((part, epoch), lambda: permutation(count, self._seed, "mixture-part", part, epoch))


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
