"""The order of a mixture's records: a pure function of seed and position, the same in every process."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from rlhf_core.util import permutation

_BLOCK = 1000
"""Positions among which the weights of a mixture hold exactly, up to rounding."""
_KEPT = 4
"""Shuffled blocks, and epochs of each part, kept: several makers read before and after the end of one."""


class Turns:
    """Turns of parts by their weights: each part has its share of every 1,000 positions."""

    def __init__(self, seed: int, weights: Sequence[float]) -> None:
        self._seed = seed
        self._slots = shares(weights, _BLOCK)
        self._block = lru_cache(_KEPT)(self._make_block)

    def at(self, position: int) -> tuple[int, int]:
        """Return the part at a position (>= 0), and how many turns it had before."""
        block, place = divmod(position, _BLOCK)
        part, turn = divmod(self._block(block)[place], _BLOCK)
        return part, block * self._slots[part] + turn

    def _make_block(self, block: int) -> array[int]:
        """For each place of a block: part x 1000 + how many places of that part come before it in the block."""
        owners = [part for part, count in enumerate(self._slots) for _ in range(count)]
        turns = [0] * len(self._slots)
        made = array("q")
        for place in permutation(_BLOCK, self._seed, "mixture", block):
            part = owners[place]
            made.append(part * _BLOCK + turns[part])
            turns[part] += 1
        return made


def shares(weights: Sequence[float], total: int) -> list[int]:
    """Return `total` divided by weights, by largest remainder."""
    whole = sum(weights)
    exact = [total * weight / whole for weight in weights]
    found = [int(each) for each in exact]
    by_remainder = sorted(range(len(found)), key=lambda part: found[part] - exact[part])
    for part in by_remainder[: total - sum(found)]:
        found[part] += 1
    return found


class MixtureOrder:
    """Endless: each part is shuffled again in each of its epochs, and parts take turns by their weights.

    A weight is a share of the positions: a small part with a large weight repeats more often.
    """

    def __init__(self, seed: int, parts: Sequence[tuple[float, Sequence[int]]]) -> None:
        """parts: weight and records (indices in the mixture) of each."""
        self._seed, self._parts = seed, parts
        self._records = [records for _, records in parts]
        self._turns = Turns(seed, [weight for weight, _ in parts])

        @lru_cache(_KEPT * len(parts))
        def epoch_of(part: int, epoch: int) -> array[int]:
            return array("q", permutation(len(self._records[part]), seed, "mixture-part", part, epoch))

        self._epoch = epoch_of

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave out the caches, which cannot be pickled."""
        return MixtureOrder, (self._seed, self._parts)

    def index(self, position: int) -> int:
        """Return the record (its index in the mixture) at `position` (>= 0)."""
        part, turn = self._turns.at(position)
        records = self._records[part]
        epoch, place = divmod(turn, len(records))
        return records[self._epoch(part, epoch)[place]]
