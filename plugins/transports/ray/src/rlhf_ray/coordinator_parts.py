"""State of the coordinator: who waits for what, the parts of an evaluation, what rewards keep, what each actor does."""

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


class MakerStates:
    """State of the makers' rewards and players, kept over a resume."""

    def __init__(self) -> None:
        self._states: dict[int, Mapping[str, Any]] = {}
        """Number of a maker -> its state."""
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


@dataclass(slots=True)
class _Maker:
    pid: int | None
    node: str | None
    actor: Any
    last_seen: float
    since: float
    counted: float
    """Until when its time is counted as busy or idle."""
    doing: str = "waits"
    working: bool = False
    why: str = "it has just registered"
    """Why it has no work, where it has none."""
    idle_s: float = 0.0
    """Since `take_idle_fraction`."""
    busy_total_s: float = 0.0
    idle_total_s: float = 0.0
    num_groups: int = 0
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
        self._leaving: set[str] = set()
        self._counted_since = clock()

    @property
    def registered(self) -> set[str]:
        return set(self._makers)

    def register(self, name: str, pid: int | None = None, node: str | None = None, actor: Any = None) -> None:
        """`actor`: its handle, for trainers to call it by."""
        now = self._clock()
        self._makers[name] = _Maker(pid, node, actor, last_seen=now, since=now, counted=now)

    def actors(self) -> dict[str, Any]:
        """Name -> handle."""
        return {name: maker.actor for name, maker in self._makers.items()}

    def forget(self, name: str) -> None:
        self._makers.pop(name, None)

    def leave(self, name: str) -> None:
        """The maker is to get no more work, registered or not."""
        self._leaving.add(name)

    def is_leaving(self, name: str) -> bool:
        return name in self._leaving

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
        self._count(maker, now)
        maker.since = now
        maker.last_seen = now
        maker.working = work is not None
        maker.doing = _describe(work)

    def waits(self, name: str, why: str) -> None:
        """The maker has no work yet: why."""
        if name in self._makers:
            self._makers[name].why = why

    def made(self, name: str, num_groups: int) -> None:
        """The maker has handed in groups."""
        self.seen(name)
        if name in self._makers:
            self._makers[name].num_groups += num_groups

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
            self._count(maker, now)
            idle += maker.idle_s
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

    def describe(self, waiting: Mapping[str, int], owed: Mapping[str, int]) -> list[Mapping[str, Any]]:
        """State of each maker for display.

        waiting, owed: name -> its groups that wait to be trained on, and its leases.
        """
        now = self._clock()
        rows: list[Mapping[str, Any]] = []
        for name, maker in sorted(self._makers.items()):
            self._count(maker, now)
            total = maker.busy_total_s + maker.idle_total_s
            rows.append(
                {
                    "name": name,
                    "pid": maker.pid,
                    "node": maker.node,
                    "doing": maker.doing if maker.working else f"waits: {maker.why}",
                    "for_s": round(now - maker.since, 1),
                    "version": maker.version,
                    "leaving": name in self._leaving,
                    "busy": round(maker.busy_total_s / total, 4) if total else 0.0,
                    "groups": maker.num_groups,
                    "making": owed.get(name, 0),
                    "waiting": waiting.get(name, 0),
                }
            )
        return rows

    def _count(self, maker: _Maker, now: float) -> None:
        """Count the time since the last call."""
        spent, maker.counted = now - maker.counted, now
        if maker.working:
            maker.busy_total_s += spent
        else:
            maker.idle_s += spent
            maker.idle_total_s += spent


def _describe(work: Work | None) -> str:
    if isinstance(work, RolloutWork):
        return f"makes {len(work.positions)} prompts from {work.positions[0]}"
    if isinstance(work, EvaluationWork):
        return f"answers held-out prompts {work.start} to {work.stop}"
    return "waits" if work is None else "ends"


@dataclass(slots=True)
class _Trainer:
    last_seen: float
    since: float
    waits: bool = False
    doing: str = "loads its models"
    waited_s: float = 0.0
    started: float = 0.0


class TrainerRegistry:
    """The trainers: their signs of life, and what they wait for."""

    def __init__(self, heartbeat_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._heartbeat_seconds = heartbeat_seconds
        self._clock = clock
        self._trainers: dict[str, _Trainer] = {}

    def seen(self, name: str) -> None:
        """Record a heartbeat."""
        now = self._clock()
        self._trainers.setdefault(name, _Trainer(now, now, started=now)).last_seen = now

    def waits(self, name: str, what: str) -> None:
        """The trainer asks for something that is not there yet."""
        self._begin(name, f"waits for {what}", waits=True)

    def works(self, name: str, on: str) -> None:
        """The trainer has what it needs to go on."""
        self._begin(name, on, waits=False)

    def silent(self) -> dict[str, float]:
        """Trainers without a heartbeat for too long -> seconds since the last."""
        now = self._clock()
        silences = {name: now - trainer.last_seen for name, trainer in self._trainers.items()}
        return {name: silence for name, silence in silences.items() if silence > self._heartbeat_seconds}

    def describe(self) -> dict[str, Mapping[str, Any]]:
        """Name -> what it does, for how long, and the share of its time in which it did not wait."""
        now = self._clock()
        rows: dict[str, Mapping[str, Any]] = {}
        for name, trainer in sorted(self._trainers.items()):
            waited = trainer.waited_s + (now - trainer.since if trainer.waits else 0.0)
            total = now - trainer.started
            busy = 1.0 - waited / total if total > 0 else 0.0
            rows[name] = {
                "doing": trainer.doing,
                "for_s": round(now - trainer.since, 1),
                "busy": round(busy, 4),
            }
        return rows

    def _begin(self, name: str, doing: str, *, waits: bool) -> None:
        self.seen(name)
        trainer, now = self._trainers[name], self._clock()
        trainer.waited_s += now - trainer.since if trainer.waits else 0.0
        trainer.since, trainer.waits, trainer.doing = now, waits, doing
