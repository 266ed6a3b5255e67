"""State of the coordinator: waiting calls, the parts of an evaluation, makers' states, and each actor's activity."""

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
"""Topic on which a caller of the coordinator waits."""


class Waiters:
    """Calls that wait for a change, by topic."""

    def __init__(self) -> None:
        self._waiting: dict[Topic, set[asyncio.Future[None]]] = defaultdict(set)

    def wake(self, *topics: Topic) -> None:
        """Have the calls that wait on these topics check again."""
        for topic in topics:
            for future in self._waiting.pop(topic, ()):
                if not future.done():
                    future.set_result(None)

    async def until(self, topic: Topic, get_value: Callable[[], T], timeout_seconds: float) -> T:
        """Call `get_value` after every change until it returns a true value or the time is up, and return its value."""
        deadline = time.monotonic() + timeout_seconds
        while not (value := get_value()) and (remaining := deadline - time.monotonic()) > 0:
            future = asyncio.get_running_loop().create_future()
            self._waiting[topic].add(future)
            await asyncio.wait([future], timeout=remaining)
            self._waiting[topic].discard(future)
        return value


class EvaluationJobs:
    """Parts of the current evaluation. There is at most one evaluation at a time.

    Example:
        >>> jobs = EvaluationJobs()
        >>> jobs.open(num_prompts=5, part_size=4, version=1)
        >>> str(jobs.take("maker-0")), jobs.describe()
        ('answers held-out prompts 0 to 4', "1 parts wait for a maker, in progress: ['maker-0']")
    """

    def __init__(self) -> None:
        self._open: dict[EvaluationWork, str | None] = {}
        """Unanswered part -> the maker that answers it, None if it is unassigned."""
        self._rows: dict[int, Sequence[EvaluationRow]] = {}

    def open(self, num_prompts: int, part_size: int, version: int) -> None:
        """Start an evaluation: split the prompts into parts of `part_size`."""
        starts = range(0, num_prompts, part_size)
        self._open = {EvaluationWork(start, min(start + part_size, num_prompts), version): None for start in starts}
        self._rows = {}

    def take(self, maker: str) -> EvaluationWork | None:
        """Assign the next part to `maker`. Returns None if none is left."""
        work = next((each for each, holder in self._open.items() if holder is None), None)
        if work is not None:
            self._open[work] = maker
        return work

    def done(self, work: EvaluationWork, rows: Sequence[EvaluationRow]) -> None:
        """Store a part's rows. A part that was answered twice counts once."""
        if work in self._open:
            del self._open[work]
            self._rows[work.start] = rows

    def release(self, maker: str) -> None:
        """Reassign the parts of a lost maker."""
        self._open.update(dict.fromkeys(work for work, holder in self._open.items() if holder == maker))

    @property
    def complete(self) -> bool:
        """Whether every part has been answered."""
        return not self._open

    def rows(self) -> list[EvaluationRow]:
        """All rows, in the order of the prompts."""
        return [row for start in sorted(self._rows) for row in self._rows[start]]

    def describe(self) -> str:
        """Describe the parts that are still missing."""
        makers = list(self._open.values())
        return f"{makers.count(None)} parts wait for a maker, in progress: {sorted(set(filter(None, makers)))}"


class MakerStates:
    """State of the makers' rewards and players, which is kept across a resume."""

    def __init__(self) -> None:
        self._states: dict[int, Mapping[str, Any]] = {}
        """Number of a maker -> its state."""
        self._restored: Sequence[Mapping[str, Any]] = ()

    def keep(self, number: int, state: Mapping[str, Any]) -> None:
        """Store the state of maker `number`."""
        self._states[number] = state

    def of(self, number: int) -> Mapping[str, Any]:
        """State from which maker `number`, even one added after a resume, continues. Empty if it starts fresh."""
        if number in self._states or not self._restored:
            return self._states.get(number, {})
        return self._restored[number % len(self._restored)]

    def all(self) -> list[Mapping[str, Any]]:
        """All states, in the order of the makers."""
        return [self._states[number] for number in sorted(self._states)]

    def restore(self, states: Sequence[Mapping[str, Any]], num_makers: int) -> None:
        """Continue from a checkpoint, which may have had another number of makers."""
        self._restored = states
        self._states = {number: states[number % len(states)] for number in range(num_makers)}


@dataclass(slots=True)
class _ActorState:
    row: ActorRow
    handle: Any
    last_seen: float
    since: float
    counted_until: float
    """Time up to which working and idle time has been counted."""
    works: bool = False
    worked_s: float = 0.0
    idle_s: float = 0.0
    untaken_idle_s: float = 0.0
    """Part of `idle_s` since the last `take_idle_fraction`."""


class ActorRegistry:
    """Activity and heartbeats of the registered makers, or trainers, to detect lost actors.

    A lost actor is forgotten, and its replacement registers again.

    Example:
        >>> registry = ActorRegistry(heartbeat_seconds=60.0)
        >>> registry.register("maker-0")
        >>> registry.set_working("maker-0", "makes 4 prompts")
        >>> registry.rows()[0].doing, registry.stuck()
        ('makes 4 prompts', {})
    """

    def __init__(
        self, heartbeat_seconds: float, work_seconds: float = math.inf, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Create an empty registry.

        Args:
            heartbeat_seconds: Silence after which an actor is presumed dead.
            work_seconds: Maximum duration of one piece of work.
            clock: Returns the current time in seconds.
        """
        self._heartbeat_seconds = heartbeat_seconds
        self._work_seconds = work_seconds
        self._clock = clock
        self._actors: dict[str, _ActorState] = {}
        self._counted_since = clock()

    def __contains__(self, name: str) -> bool:
        return name in self._actors

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._actors))

    def __len__(self) -> int:
        return len(self._actors)

    def register(self, name: str, pid: int | None = None, node: str | None = None, handle: Any = None) -> None:
        """Add an actor, or reset it. `handle` is what `handles` returns for it."""
        now = self._clock()
        row = ActorRow(name=name, pid=pid, node=node, doing="waits")
        self._actors[name] = _ActorState(row, handle, last_seen=now, since=now, counted_until=now)

    def handles(self) -> dict[str, Any]:
        """All actors: name -> handle."""
        return {name: actor.handle for name, actor in self._actors.items()}

    def forget(self, name: str) -> None:
        """Remove an actor, if it is registered."""
        self._actors.pop(name, None)

    def record_heartbeat(self, name: str) -> None:
        """Record that the actor is alive."""
        if name in self._actors:
            self._actors[name].last_seen = self._clock()

    def set_working(self, name: str, doing: str) -> None:
        """Record that the actor starts a piece of work."""
        self._set_activity(name, doing, works=True)

    def set_waiting(self, name: str, why: str) -> None:
        """Record that the actor has nothing to do, and why."""
        self._set_activity(name, f"waits: {why}", works=False)

    def add_groups(self, name: str, num_groups: int) -> None:
        """Record that a maker has submitted groups."""
        self.record_heartbeat(name)
        if name in self._actors:
            self._actors[name].row.groups += num_groups

    def set_version(self, name: str, version: int) -> None:
        """Record the version of a maker's weights."""
        self.record_heartbeat(name)
        if name in self._actors:
            self._actors[name].row.version = version

    def take_idle_fraction(self) -> float:
        """Fraction of the actors' time since the last call in which they were idle."""
        now = self._clock()
        elapsed = (now - self._counted_since) * max(1, len(self._actors))
        idle = 0.0
        for actor in self._actors.values():
            _count_time(actor, now)
            idle += actor.untaken_idle_s
            actor.untaken_idle_s = 0.0
        self._counted_since = now
        return min(1.0, idle / elapsed) if elapsed > 0 else 0.0

    def stuck(self) -> dict[str, str]:
        """Actors that are presumed dead -> reason."""
        now = self._clock()
        reasons: dict[str, str] = {}
        for name, actor in self._actors.items():
            if now - actor.last_seen > self._heartbeat_seconds:
                reasons[name] = f"sent no heartbeat for {now - actor.last_seen:.0f} s"
            elif actor.works and now - actor.since > self._work_seconds:
                reasons[name] = f"has been busy for {now - actor.since:.0f} s ({actor.row.doing})"
        return reasons

    def rows(self, waiting: Mapping[str, int] = MappingProxyType({})) -> list[ActorRow]:
        """State of each actor for display. `waiting` maps a maker to its number of groups not yet trained on."""
        now = self._clock()
        for actor in self._actors.values():
            _count_time(actor, now)
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

    def _set_activity(self, name: str, doing: str, *, works: bool) -> None:
        self.record_heartbeat(name)
        if (actor := self._actors.get(name)) is None:
            return
        now = self._clock()
        _count_time(actor, now)
        if works or actor.works:  # an actor that keeps waiting may have a new reason
            actor.since = now
        actor.works, actor.row.doing = works, doing


def _count_time(actor: _ActorState, now: float) -> None:
    """Add the time since the last call to the actor's working or idle time."""
    spent, actor.counted_until = now - actor.counted_until, now
    if actor.works:
        actor.worked_s += spent
    else:
        actor.idle_s += spent
        actor.untaken_idle_s += spent
