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


def choose_samples(records: Iterable[Sample], per_group: int = PER_GROUP) -> SampleChoice:
    """Choose deterministically. Samples without a score are neither best nor worst."""
    best: list[tuple[float, int, Sample]] = []
    worst: list[tuple[float, int, Sample]] = []
    first, last, anyone = _Reservoir(per_group), _Reservoir(per_group), _Reservoir(per_group)
    first_version = last_version = None
    total = 0
    for total, record in enumerate(records, start=1):
        anyone.add(record)
        score = _score(record)
        if score is not None:
            _keep_largest(best, (score, -total, record), per_group)
            _keep_largest(worst, (-score, -total, record), per_group)
        version = record.get("policy_version")
        if not isinstance(version, int):
            continue
        if first_version is None or version < first_version:
            first_version, first = version, _Reservoir(per_group)
        if last_version is None or version > last_version:
            last_version, last = version, _Reservoir(per_group)
        if version == first_version:
            first.add(record)
        if version == last_version:
            last.add(record)
    groups = {
        "best": [record for *_, record in sorted(best, key=_order, reverse=True)],
        "worst": [record for *_, record in sorted(worst, key=_order, reverse=True)],
        "random": anyone.kept,
    }
    if first_version != last_version:
        groups |= {"first": first.kept, "last": last.kept}
    return SampleChoice({name: group for name, group in groups.items() if group}, total)


class _Reservoir:
    """A uniform sample of a stream (Vitter 1985, algorithm R), seeded, so that reports are reproducible."""

    def __init__(self, size: int) -> None:
        self.kept: list[Sample] = []
        self._size = size
        self._seen = 0
        self._random = random.Random(0)

    def add(self, record: Sample) -> None:
        self._seen += 1
        if len(self.kept) < self._size:
            self.kept.append(record)
        elif (place := self._random.randrange(self._seen)) < self._size:
            self.kept[place] = record


def _keep_largest(heap: list[tuple[float, int, Sample]], entry: tuple[float, int, Sample], size: int) -> None:
    if len(heap) < size:
        heapq.heappush(heap, entry)
    elif entry[:2] > heap[0][:2]:
        heapq.heapreplace(heap, entry)


def _order(entry: tuple[float, int, Sample]) -> tuple[float, int]:
    return entry[:2]


def _score(record: Sample) -> float | None:
    score = record.get("score")
    if isinstance(score, int | float):
        return float(score)
    rewards = record.get("rewards")
    values = list(rewards.values()) if isinstance(rewards, Mapping) else []
    return float(sum(values)) if values and all(isinstance(value, int | float) for value in values) else None
