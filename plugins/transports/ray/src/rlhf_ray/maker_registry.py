"""Who makes: what each maker does, since when, and when it was last heard of."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .messages import EvaluationWork, RolloutWork, Work


@dataclass(slots=True)
class _Maker:
    pid: int
    node: str
    last_seen: float
    since: float
    doing: str = "waits"
    working: bool = False
    idle_s: float = 0.0
    version: int | None = None


class MakerRegistry:
    """The makers that are there. A maker that is gone is forgotten; the one in its place registers anew."""

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

    def register(self, name: str, pid: int, node: str) -> None:
        now = self._clock()
        self._makers[name] = _Maker(pid, node, last_seen=now, since=now)

    def forget(self, name: str) -> None:
        self._makers.pop(name, None)

    def seen(self, name: str) -> None:
        """A sign of life."""
        if name in self._makers:
            self._makers[name].last_seen = self._clock()

    def begins(self, name: str, work: Work | None) -> None:
        """The maker begins `work`, or begins to wait for some."""
        if name not in self._makers:
            return
        maker, now = self._makers[name], self._clock()
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
        """Share of the makers' time since the last call in which they had nothing to do."""
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
        """Makers that should be started anew, and why."""
        now = self._clock()
        found: dict[str, str] = {}
        for name, maker in self._makers.items():
            if now - maker.last_seen > self._heartbeat_seconds:
                found[name] = f"gave no sign of life for {now - maker.last_seen:.0f} s"
            elif maker.working and now - maker.since > self._work_seconds:
                found[name] = f"{maker.doing} since {now - maker.since:.0f} s"
        return found

    def describe(self) -> list[Mapping[str, Any]]:
        """For people: name, pid, node, what it does and for how long, version."""
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
