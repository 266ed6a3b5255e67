"""Chooses the samples of a report: best, worst, random, and those of the first and the last policy.

It makes one pass over the file and keeps only the chosen samples in memory.
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
    """Chosen samples by group (`best`, `worst`, `random`, `first`, `last`), and the total number of samples."""

    groups: Mapping[str, Sequence[Sample]]
    total: int


class _Group:
    """The samples with the largest ranks."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._heap: list[tuple[tuple[float, ...], Sample]] = []

    def add(self, rank: tuple[float, ...], sample: Sample) -> None:
        """Add a sample. Ranks must be unique."""
        heapq.heappush(self._heap, (rank, sample))
        if len(self._heap) > self._size:
            heapq.heappop(self._heap)

    def samples(self) -> list[Sample]:
        """The samples in order of decreasing rank."""
        return [sample for _, sample in sorted(self._heap, key=lambda ranked: ranked[0], reverse=True)]


def choose_samples(records: Iterable[Sample], per_group: int = PER_GROUP) -> SampleChoice:
    """Choose samples deterministically. Samples without a score are neither best nor worst."""
    best, worst, anyone, first, last = (_Group(per_group) for _ in range(5))
    generator = random.Random(0)
    total = 0
    for total, record in enumerate(records, start=1):
        score, version, chance = _score(record), record.get("policy_version"), generator.random()
        anyone.add((chance, -total), record)
        if score is not None:
            best.add((score, -total), record)
            worst.add((-score, -total), record)
        if isinstance(version, int):
            first.add((-version, chance, -total), record)
            last.add((version, chance, -total), record)
    groups = {"best": best.samples(), "worst": worst.samples(), "random": anyone.samples()}
    firsts, lasts = _select_one_policy(first.samples()), _select_one_policy(last.samples())
    if firsts and firsts[0]["policy_version"] != lasts[0]["policy_version"]:
        groups |= {"first": firsts, "last": lasts}
    return SampleChoice({name: group for name, group in groups.items() if group}, total)


def _select_one_policy(samples: Sequence[Sample]) -> list[Sample]:
    """Select the samples with the policy version of the first one."""
    return [each for each in samples if each["policy_version"] == samples[0]["policy_version"]]


def _score(record: Sample) -> float | None:
    score = record.get("score")
    if isinstance(score, int | float):
        return float(score)
    rewards = record.get("rewards")
    values = list(rewards.values()) if isinstance(rewards, Mapping) else []
    return float(sum(values)) if values and all(isinstance(value, int | float) for value in values) else None
