"""Records of several sources, each with an order and a cursor of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING

from ..types import sum_by_key
from .order import Turns

if TYPE_CHECKING:
    from .encoder import Record
    from .stream import Records


class MixedRecords:
    """Parts that take turns by their weights, of which some have no known length.

    A position says whose turn it is and how many that part had before, which is its cursor.
    """

    def __init__(self, parts: Sequence[tuple[float, Records]], *, seed: int) -> None:
        """parts: weight and records of each."""
        self.epoch_size: int | None = None
        self._parts = [records for _, records in parts]
        self._turns = Turns(seed, [weight for weight, _ in parts])
        self.digest = sha256("".join(part.digest for part in self._parts).encode()).hexdigest()
        counts = sum_by_key([part.counts for part in self._parts])
        self.counts: Mapping[str, int] = {reason: int(count) for reason, count in counts.items()}

    def has_digest(self, digest: str) -> bool:
        return digest == self.digest

    def at(self, position: int) -> tuple[Record, str]:
        part, turn = self._turns.at(position)
        return self._parts[part].at(turn)

    def at_index(self, index: int) -> tuple[Record, str]:
        raise TypeError("a mixture of streams has no index")

    def held_out(self) -> list[tuple[Record, str]]:
        return [found for part in self._parts for found in part.held_out()]
