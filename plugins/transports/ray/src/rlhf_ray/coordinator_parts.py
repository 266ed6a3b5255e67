"""State of the coordinator: who waits for what, the parts of an evaluation, what rewards keep, what each actor does."""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from rlhf_core.rollout import EvaluationRow

from .driver_files import ActorRow
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
        self._left: dict[EvaluationWork, str | None] = {}
        """Part -> who answers it, None where nobody does; of those that have no rows."""
        self._rows: dict[int, Sequence[EvaluationRow]] = {}

    def open(self, num_prompts: int, part_size: int, version: int) -> None:
        """Cut the prompts into parts of `part_size`."""
        starts = range(0, num_prompts, part_size)
        self._left = {EvaluationWork(start, min(start + part_size, num_prompts), version): None for start in starts}
        self._rows = {}

    def take(self, maker: str) -> EvaluationWork | None:
        """The next part, for `maker`."""
        work = next((each for each, holder in self._left.items() if holder is None), None)
        if work is not None:
            self._left[work] = maker
        return work

    def done(self, work: EvaluationWork, rows: Sequence[EvaluationRow]) -> None:
        """Take a part's rows; a part that was answered twice counts once."""
        if work in self._left:
            del self._left[work]
            self._rows[work.start] = rows

    def release(self, maker: str) -> None:
        """Have a lost maker's parts answered by others."""
        self._left.update(dict.fromkeys(work for work, holder in self._left.items() if holder == maker))

    @property
    def complete(self) -> bool:
        return not self._left

    def rows(self) -> list[EvaluationRow]:
        """All rows, in the order of the prompts."""
        return [row for start in sorted(self._rows) for row in self._rows[start]]

    def describe(self) -> str:
        """Text on the parts that are still missing."""
        makers = list(self._left.values())
        return f"{makers.count(None)} parts wait for a maker, in the making: {sorted(set(filter(None, makers)))}"


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
class _Actor:
    row: ActorRow
    handle: Any
    last_seen: float
    since: float
    counted: float
    """Until when its time is counted as spent working or idle."""
    works: bool = False
    worked_s: float = 0.0
    idle_s: float = 0.0
    new_idle_s: float = 0.0
    """Of it, since `take_idle_fraction`."""


class ActorRegistry:
    """The makers, or the trainers, that have given a sign of life: what they do, and which are lost.

    One that is lost is forgotten; its replacement registers anew.
    """

    def __init__(
        self, heartbeat_seconds: float, work_seconds: float = math.inf, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`work_seconds`: longest that one piece of work may take."""
        self._heartbeat_seconds = heartbeat_seconds
        self._work_seconds = work_seconds
        self._clock = clock
        self._actors: dict[str, _Actor] = {}
        self._counted_since = clock()

    def __contains__(self, name: str) -> bool:
        return name in self._actors

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._actors))

    def __len__(self) -> int:
        return len(self._actors)

    def register(self, name: str, pid: int | None = None, node: str | None = None, handle: Any = None) -> None:
        """`handle`: for others to call it by."""
        now = self._clock()
        row = ActorRow(name=name, pid=pid, node=node, doing="waits")
        self._actors[name] = _Actor(row, handle, last_seen=now, since=now, counted=now)

    def handles(self) -> dict[str, Any]:
        """Name -> handle."""
        return {name: actor.handle for name, actor in self._actors.items()}

    def forget(self, name: str) -> None:
        self._actors.pop(name, None)

    def seen(self, name: str) -> None:
        """Record a sign of life."""
        if name in self._actors:
            self._actors[name].last_seen = self._clock()

    def works(self, name: str, doing: str) -> None:
        """The actor begins a piece of work."""
        self._does(name, doing, works=True)

    def waits(self, name: str, why: str) -> None:
        """The actor has nothing to do: why."""
        self._does(name, f"waits: {why}", works=False)

    def made(self, name: str, num_groups: int) -> None:
        """A maker has handed in groups."""
        self.seen(name)
        if name in self._actors:
            self._actors[name].row.groups += num_groups

    def has_version(self, name: str, version: int) -> None:
        self.seen(name)
        if name in self._actors:
            self._actors[name].row.version = version

    def take_idle_fraction(self) -> float:
        """Share of the actors' time since the last call in which they were idle."""
        now = self._clock()
        elapsed = (now - self._counted_since) * max(1, len(self._actors))
        idle = 0.0
        for actor in self._actors.values():
            _count(actor, now)
            idle += actor.new_idle_s
            actor.new_idle_s = 0.0
        self._counted_since = now
        return min(1.0, idle / elapsed) if elapsed > 0 else 0.0

    def stuck(self) -> dict[str, str]:
        """Actors that are held for dead -> reason."""
        now = self._clock()
        found: dict[str, str] = {}
        for name, actor in self._actors.items():
            if now - actor.last_seen > self._heartbeat_seconds:
                found[name] = f"gave no sign of life for {now - actor.last_seen:.0f} s"
            elif actor.works and now - actor.since > self._work_seconds:
                found[name] = f"{actor.row.doing} since {now - actor.since:.0f} s"
        return found

    def rows(self, waiting: Mapping[str, int] = MappingProxyType({})) -> list[ActorRow]:
        """State of each actor for display. waiting: maker -> its groups that wait to be trained on."""
        now = self._clock()
        for actor in self._actors.values():
            _count(actor, now)
        return [
            actor.row.model_copy(
                update={
                    "for_s": round(now - actor.since, 1),
                    "busy": round(actor.worked_s / max(actor.worked_s + actor.idle_s, 1e-9), 4),
                    "waiting": waiting.get(name, 0),
                }
            )
            for name, actor in sorted(self._actors.items())
        ]

    def _does(self, name: str, doing: str, *, works: bool) -> None:
        self.seen(name)
        if (actor := self._actors.get(name)) is None:
            return
        now = self._clock()
        _count(actor, now)
        if works or actor.works:  # who goes on waiting may do so for another reason
            actor.since = now
        actor.works, actor.row.doing = works, doing


def _count(actor: _Actor, now: float) -> None:
    """Count the time since the last call."""
    spent, actor.counted = now - actor.counted, now
    if actor.works:
        actor.worked_s += spent
    else:
        actor.idle_s += spent
        actor.new_idle_s += spent
