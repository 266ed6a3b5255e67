"""Messages between the actors of a run. Plain values only, since the coordinator imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlhf_core.types import PhaseTimes

from .driver_files import ActorRow
from .sample_store import StoredGroup


@dataclass(frozen=True, slots=True)
class RolloutWork:
    """Make rollouts of these prompts, with weights of this policy version or a newer one."""

    positions: tuple[int, ...]
    version: int
    era: int = 0
    """Number of rollbacks so far; work requested in an earlier era is discarded."""
    records: tuple[int, ...] = ()
    """The record of each position, where a sampler has drawn them."""

    def __str__(self) -> str:
        return f"makes {len(self.positions)} prompts from {self.positions[0]}"


@dataclass(frozen=True, slots=True)
class EvaluationWork:
    """Answer the held-out prompts `start` to `stop` with weights of this version."""

    start: int
    stop: int
    version: int

    def __str__(self) -> str:
        return f"answers held-out prompts {self.start} to {self.stop}"


@dataclass(frozen=True, slots=True)
class RunOver:
    """There is no more work."""

    def __str__(self) -> str:
        return "ends"


Work = RolloutWork | EvaluationWork | RunOver


@dataclass(frozen=True, slots=True)
class TakenEpisode:
    """An episode as a trainer receives it."""

    groups: Sequence[StoredGroup]
    times: PhaseTimes
    """Phase times, averaged over the makers."""
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Event:
    """A hook event for another process; `arguments` are pickled, since the coordinator cannot unpickle them."""

    name: str
    arguments: bytes


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of an actor's log."""

    actor: str
    level: int
    text: str


@dataclass(frozen=True, slots=True)
class Overview:
    """Snapshot of the run, for the driver and for `rlhf ray status`."""

    version: int
    progress: str
    makers: Sequence[ActorRow]
    trainers: Sequence[ActorRow]
    queue: int
    """Groups that are finished and wait to be trained on."""
    stuck: Mapping[str, str]
    """Makers to be restarted -> reason."""
    silent: Mapping[str, str]
    """Trainers without a sign of life for too long -> what is said of that."""
    events: Sequence[Event | LogLine]
