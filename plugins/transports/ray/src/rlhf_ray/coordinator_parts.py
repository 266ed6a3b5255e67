"""State of the coordinator: the registered makers and their work, and the parts of an evaluation."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from rlhf_core.rollout import EvaluationRow

from .messages import EvaluationWork, RolloutWork, Work

T = TypeVar("T")
Topic = Literal["work", "samples", "makers", "evaluation", "events"]
"""What a caller of the coordinator waits for."""


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


@dataclass(slots=True)
class _Maker:
    pid: int | None
    node: str | None
    actor: Any
    last_seen: float
    since: float
    doing: str = "waits"
    working: bool = False
    idle_s: float = 0.0
    version: int | None = None


class MakerRegistry:
    """The registered makers. A lost maker is removed; its replacement registers anew."""

    def __init__(
        self, heartbeat_seconds: float, work_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`work_seconds`: longest that one piece of work may take."""
        self._heartbeat_seconds = heartbeat_seconds
        self._work_seconds = work_seconds
        self._clock = clock
        self._makers: dict[str, _Maker] = {}
        self._counted_since = clock()

    @property
    def registered(self) -> set[str]:
        return set(self._makers)

    def register(self, name: str, pid: int | None = None, node: str | None = None, actor: Any = None) -> None:
        """`actor`: its handle, for trainers to call it by."""
        now = self._clock()
        self._makers[name] = _Maker(pid, node, actor, last_seen=now, since=now)

    def actors(self) -> dict[str, Any]:
        """Name -> handle."""
        return {name: maker.actor for name, maker in self._makers.items()}

    def forget(self, name: str) -> None:
        self._makers.pop(name, None)

    def seen(self, name: str) -> None:
        """Record a heartbeat."""
        if name in self._makers:
            self._makers[name].last_seen = self._clock()

    def begins(self, name: str, work: Work | None, under_way: int = 0) -> None:
        """The maker begins `work`, or with None begins to wait for work; meanwhile it does so many other works."""
        if name not in self._makers:
            return
        maker, now = self._makers[name], self._clock()
        if work is None and under_way:
            maker.last_seen = now
            return
        if not maker.working:
            maker.idle_s += now - max(maker.since, self._counted_since)
        maker.since = now
        maker.last_seen = now
        maker.working = work is not None
        maker.doing = _describe(work)

    def has_version(self, name: str, version: int) -> None:
        if name in self._makers:
            self._makers[name].version = version
        self.seen(name)

    def take_idle_fraction(self) -> float:
        """Share of the makers' time since the last call in which they were idle."""
        now = self._clock()
        elapsed = (now - self._counted_since) * max(1, len(self._makers))
        idle = 0.0
        for maker in self._makers.values():
            running = 0.0 if maker.working else now - max(maker.since, self._counted_since)
            idle += maker.idle_s + running
            maker.idle_s = 0.0
        self._counted_since = now
        return min(1.0, idle / elapsed) if elapsed > 0 else 0.0

    def stuck(self) -> dict[str, str]:
        """Makers that should be restarted -> reason."""
        now = self._clock()
        found: dict[str, str] = {}
        for name, maker in self._makers.items():
            if now - maker.last_seen > self._heartbeat_seconds:
                found[name] = f"gave no sign of life for {now - maker.last_seen:.0f} s"
            elif maker.working and now - maker.since > self._work_seconds:
                found[name] = f"{maker.doing} since {now - maker.since:.0f} s"
        return found

    def describe(self) -> list[Mapping[str, Any]]:
        """State of each maker for display: name, pid, node, current work and its duration, version."""
        now = self._clock()
        return [
            {
                "name": name,
                "pid": maker.pid,
                "node": maker.node,
                "doing": maker.doing,
                "for_s": round(now - maker.since, 1),
                "version": maker.version,
            }
            for name, maker in sorted(self._makers.items())
        ]


def _describe(work: Work | None) -> str:
    if isinstance(work, RolloutWork):
        return f"makes {len(work.positions)} prompts from {work.positions[0]}"
    if isinstance(work, EvaluationWork):
        return f"answers held-out prompts {work.start} to {work.stop}"
    return "waits" if work is None else "ends"


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
