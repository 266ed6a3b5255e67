"""State of the coordinator: who waits for what, the parts of an evaluation, what rewards keep."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from rlhf_core.rollout import EvaluationRow

from .messages import EvaluationWork

T = TypeVar("T")
Topic = Literal["work", "samples", "makers", "evaluation", "events"]
"""Topic that a caller of the coordinator waits for."""


class Waiters:
    """Calls that wait for a change. Each is woken by the changes that may end its wait."""

    def __init__(self) -> None:
        self._waiting: dict[Topic, set[asyncio.Future[None]]] = defaultdict(set)

    def wake(self, *topics: Topic) -> None:
        """Have the waits on these topics look again."""
        for topic in topics:
            for future in self._waiting.pop(topic, ()):
                if not future.done():
                    future.set_result(None)

    async def until(self, topic: Topic, found: Callable[[], T], timeout_seconds: float) -> T:
        """Wait until `found` returns a true value, tried after every change; its last value when time is up."""
        deadline = time.monotonic() + timeout_seconds
        while not (answer := found()) and (remaining := deadline - time.monotonic()) > 0:
            future = asyncio.get_running_loop().create_future()
            self._waiting[topic].add(future)
            await asyncio.wait([future], timeout=remaining)
            self._waiting[topic].discard(future)
        return answer


class EvaluationJobs:
    """At most one evaluation at a time."""

    def __init__(self) -> None:
        self._waiting: list[EvaluationWork] = []
        self._held: dict[EvaluationWork, str] = {}
        self._rows: dict[int, Sequence[EvaluationRow]] = {}

    def open(self, num_prompts: int, part_size: int, version: int) -> None:
        """Cut the prompts into parts of `part_size`."""
        starts = range(0, num_prompts, part_size)
        self._waiting = [EvaluationWork(start, min(start + part_size, num_prompts), version) for start in starts]
        self._held = {}
        self._rows = {}

    def take(self, maker: str) -> EvaluationWork | None:
        """The next part, for `maker`."""
        if not self._waiting:
            return None
        work = self._waiting.pop(0)
        self._held[work] = maker
        return work

    def done(self, work: EvaluationWork, rows: Sequence[EvaluationRow]) -> None:
        """Take a part's rows; a part that was answered twice counts once."""
        if self._held.pop(work, None) is not None:
            self._rows[work.start] = rows

    def release(self, maker: str) -> None:
        """Return a lost maker's parts to the queue."""
        lost = [work for work, holder in self._held.items() if holder == maker]
        for work in lost:
            del self._held[work]
        self._waiting = sorted([*lost, *self._waiting], key=lambda work: work.start)

    @property
    def complete(self) -> bool:
        return not self._waiting and not self._held

    def rows(self) -> list[EvaluationRow]:
        """All rows, in the order of the prompts."""
        return [row for start in sorted(self._rows) for row in self._rows[start]]

    def describe(self) -> str:
        """Text on the parts that are still missing."""
        return f"{len(self._waiting)} parts wait for a maker, in the making: {sorted(set(self._held.values()))}"


class RewardStates:
    """State of the makers' rewards, kept over a resume."""

    def __init__(self) -> None:
        self._states: dict[int, Mapping[str, Any]] = {}
        """Number of a maker -> its rewards' state."""
        self._restored: Sequence[Mapping[str, Any]] = ()

    def keep(self, number: int, state: Mapping[str, Any]) -> None:
        self._states[number] = state

    def of(self, number: int) -> Mapping[str, Any]:
        """State that maker `number` goes on from, also one added after a resume; empty where it starts anew."""
        if number in self._states or not self._restored:
            return self._states.get(number, {})
        return self._restored[number % len(self._restored)]

    def all(self) -> list[Mapping[str, Any]]:
        """In the order of the makers."""
        return [self._states[number] for number in sorted(self._states)]

    def restore(self, states: Sequence[Mapping[str, Any]], num_makers: int) -> None:
        """Go on from a checkpoint, which may have had another number of makers."""
        self._restored = states
        self._states = {number: states[number % len(states)] for number in range(num_makers)}
