"""Pairs of answers to compare: those to the same prompt, in a ring, each pair once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256

from rlhf_core.types import Rollout


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two answers in the order in which the judge sees them."""

    rollout: Rollout
    """Rollout that supplies the prompt."""
    first: str
    second: str
    indices: tuple[int, int | None]
    """Indices of both among the rollouts, the earlier one first. None is the record's known answer."""
    is_swapped: bool
    """Whether the judge sees the later one first."""

    def shares(self, first_is_better: float) -> Iterator[tuple[int, float]]:
        """Yield the index of each compared rollout and its share of the win: 1 won, 0.5 tied, 0 lost."""
        share = 1.0 - first_is_better if self.is_swapped else first_is_better
        yield self.indices[0], share
        if self.indices[1] is not None:
            yield self.indices[1], 1.0 - share


def comparisons(rollouts: Sequence[Rollout], opponents: int | None) -> list[Comparison]:
    """Pair each answer with the next `opponents` of its group (cyclically), or a lone one with its known answer.

    Args:
        rollouts: answers of any number of groups.
        opponents: number of opponents per answer, None for all of its group.
    """
    groups: dict[int, list[int]] = defaultdict(list)
    for index, rollout in enumerate(rollouts):
        groups[rollout.group_id].append(index)
    compared = []
    for indices in groups.values():
        size = len(indices)
        if size == 1:
            known = rollouts[indices[0]].answer
            if isinstance(known, str):
                compared.append(_comparison(rollouts, indices[0], None, known))
            continue
        pairs = {
            (min(i, j), max(i, j))
            for i in range(size)
            for step in range(1, min(opponents or size - 1, size - 1) + 1)
            for j in [(i + step) % size]
        }
        for i, j in sorted(pairs):
            compared.append(_comparison(rollouts, indices[i], indices[j], rollouts[indices[j]].completion))
    return compared


def _comparison(rollouts: Sequence[Rollout], one: int, other: int | None, text: str) -> Comparison:
    """Compare two answers in an order that is chosen by a hash of both texts, since judges favor a position."""
    own = rollouts[one].completion
    is_swapped = sha256(f"{own}\0{text}".encode("utf-8", "surrogatepass")).digest()[0] % 2 == 1
    first, second = (text, own) if is_swapped else (own, text)
    return Comparison(rollouts[one], first, second, (one, other), is_swapped)
