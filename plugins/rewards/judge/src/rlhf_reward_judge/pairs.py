"""Which answers are compared with which: those to one prompt, in a ring, each pair once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256

from rlhf_core.types import Rollout


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two answers in the order in which the judge sees them."""

    asked_about: Rollout
    """Whose prompt it is."""
    first: str
    second: str
    places: tuple[int, int | None]
    """Places of both among the rollouts; None is the record's known answer. The first is the earlier rollout."""
    is_swapped: bool
    """Whether the judge sees the later one first."""

    def shares(self, first_is_better: float) -> Iterator[tuple[int, float]]:
        """Place and share of each rollout that took part."""
        own = 1.0 - first_is_better if self.is_swapped else first_is_better
        yield self.places[0], own
        if self.places[1] is not None:
            yield self.places[1], 1.0 - own


def comparisons(rollouts: Sequence[Rollout], opponents: int | None) -> list[Comparison]:
    """Each answer against the next `opponents` of its group, around; an answer alone against its known answer."""
    groups: dict[int, list[int]] = defaultdict(list)
    for place, rollout in enumerate(rollouts):
        groups[rollout.group_id].append(place)
    found = []
    for places in groups.values():
        size = len(places)
        if size == 1:
            known = rollouts[places[0]].answer
            if isinstance(known, str):
                found.append(_comparison(rollouts, places[0], None, known))
            continue
        pairs = {
            (min(i, j), max(i, j))
            for i in range(size)
            for step in range(1, min(opponents or size - 1, size - 1) + 1)
            for j in [(i + step) % size]
        }
        for i, j in sorted(pairs):
            found.append(_comparison(rollouts, places[i], places[j], rollouts[places[j]].completion))
    return found


def _comparison(rollouts: Sequence[Rollout], one: int, other: int | None, text: str) -> Comparison:
    """Which comes first is drawn from both texts, since judges favour a position."""
    own = rollouts[one].completion
    drawn = sha256(f"{own}\0{text}".encode("utf-8", "surrogatepass")).digest()[0] % 2 == 1
    first, second = (text, own) if drawn else (own, text)
    return Comparison(rollouts[one], first, second, (one, other), drawn)
