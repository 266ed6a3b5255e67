"""Chooses the samples of a report: best, worst, random, and those of the first and the last policy.

One pass over the file; only the chosen samples are held in memory.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PER_GROUP = 24

Sample = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SampleChoice:
    """The samples of each group (`best`, `worst`, `random`, `first`, `last`) and how many there were."""

    groups: Mapping[str, Sequence[Sample]]
    total: int


class _Group:
    """The samples of the largest ranks."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._heap: list[tuple[tuple[float, ...], Sample]] = []

    def add(self, rank: tuple[float, ...], sample: Sample) -> None:
        """rank: another for each sample."""
        heapq.heappush(self._heap, (rank, sample))
        if len(self._heap) > self._size:
            heapq.heappop(self._heap)

    def samples(self) -> list[Sample]:
        """By rank, the largest first."""
        return [sample for _, sample in sorted(self._heap, key=lambda ranked: ranked[0], reverse=True)]


def choose_samples(records: Iterable[Sample], per_group: int = PER_GROUP) -> SampleChoice:
    """Choose deterministically. Samples without a score are neither best nor worst."""
    best, worst, anyone, first, last = (_Group(per_group) for _ in range(5))
    drawn = random.Random(0)
    total = 0
    for total, record in enumerate(records, start=1):
        score, version, chance = _score(record), record.get("policy_version"), drawn.random()
        anyone.add((chance, -total), record)
        if score is not None:
            best.add((score, -total), record)
            worst.add((-score, -total), record)
        if isinstance(version, int):
            first.add((-version, chance, -total), record)
            last.add((version, chance, -total), record)
    groups = {"best": best.samples(), "worst": worst.samples(), "random": anyone.samples()}
    of_first, of_last = _of_one_policy(first.samples()), _of_one_policy(last.samples())
    if of_first and of_first[0]["policy_version"] != of_last[0]["policy_version"]:
        groups |= {"first": of_first, "last": of_last}
    return SampleChoice({name: group for name, group in groups.items() if group}, total)


def _of_one_policy(samples: Sequence[Sample]) -> list[Sample]:
    """Those of the policy that sampled the first of them."""
    return [each for each in samples if each["policy_version"] == samples[0]["policy_version"]]


def _score(record: Sample) -> float | None:
    score = record.get("score")
    if isinstance(score, int | float):
        return float(score)
    rewards = record.get("rewards")
    values = list(rewards.values()) if isinstance(rewards, Mapping) else []
    return float(sum(values)) if values and all(isinstance(value, int | float) for value in values) else None
