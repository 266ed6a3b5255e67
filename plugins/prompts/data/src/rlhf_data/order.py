"""Order of a mixture's records: a pure function of seed and position, the same in every process."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from rlhf_core.util import permutation

_BLOCK = 1000
"""Block size in positions. Weights of a mixture are exact within each block, up to rounding."""
_CACHED = 4
"""Number of cached blocks, and cached epochs per part, since several makers read around the end of one."""


class Turns:
    """Turns of parts by their weights: each part has its share of every 1,000 positions."""

    def __init__(self, seed: int, weights: Sequence[float]) -> None:
        self._seed = seed
        self._slots = shares(weights, _BLOCK)
        self._block = lru_cache(_CACHED)(self._make_block)

    def at(self, position: int) -> tuple[int, int]:
        """Return the part at a position (>= 0), and the number of its earlier turns."""
        block, place = divmod(position, _BLOCK)
        part, turn = divmod(self._block(block)[place], _BLOCK)
        return part, block * self._slots[part] + turn

    def _make_block(self, block: int) -> array[int]:
        """For each place of a block: part x 1000 + number of places of that part before it in the block."""
        owners = [part for part, count in enumerate(self._slots) for _ in range(count)]
        turns = [0] * len(self._slots)
        encoded = array("q")
        for place in permutation(_BLOCK, self._seed, "mixture", block):
            part = owners[place]
            encoded.append(part * _BLOCK + turns[part])
            turns[part] += 1
        return encoded


def shares(weights: Sequence[float], total: int) -> list[int]:
    """Divide `total` by weights, with the largest-remainder method.

    Args:
        weights: Positive weights.
        total: Number to divide.

    Returns:
        One share per weight, with sum `total`.

    Example:
        >>> shares([2.0, 1.0, 1.0], 10)
        [5, 3, 2]
    """
    weight_sum = sum(weights)
    exact = [total * weight / weight_sum for weight in weights]
    rounded = [int(each) for each in exact]
    by_remainder = sorted(range(len(rounded)), key=lambda part: rounded[part] - exact[part])
    for part in by_remainder[: total - sum(rounded)]:
        rounded[part] += 1
    return rounded


class MixtureOrder:
    """Endless order: each part is reshuffled in each of its epochs, and parts take turns by their weights.

    A weight is a share of the positions, so a small part with a large weight repeats more often.

    Example:
        >>> order = MixtureOrder(0, [(3.0, [0, 1]), (1.0, [2])])
        >>> sum(order.index(position) == 2 for position in range(1000))
        250
    """

    def __init__(self, seed: int, parts: Sequence[tuple[float, Sequence[int]]]) -> None:
        """Create the order of `parts`: weight and records (indices in the mixture) of each."""
        self._seed, self._parts = seed, parts
        self._records = [records for _, records in parts]
        self._turns = Turns(seed, [weight for weight, _ in parts])

        @lru_cache(_CACHED * len(parts))
        def epoch_of(part: int, epoch: int) -> array[int]:
            return array("q", permutation(len(self._records[part]), seed, "mixture-part", part, epoch))

        self._epoch = epoch_of

    def __reduce__(self) -> tuple[Any, ...]:
        """Omit the caches, which cannot be pickled."""
        return MixtureOrder, (self._seed, self._parts)

    def index(self, position: int) -> int:
        """Return the record (its index in the mixture) at `position` (>= 0)."""
        part, turn = self._turns.at(position)
        records = self._records[part]
        epoch, place = divmod(turn, len(records))
        return records[self._epoch(part, epoch)[place]]
