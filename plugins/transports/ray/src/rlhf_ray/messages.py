"""Messages between the actors of a run. Plain values only, since the coordinator imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlhf_core.types import PhaseTimes

from .driver_files import ActorRow
from .sample_store import StoredGroup


@dataclass(frozen=True, slots=True)
class RolloutWork:
    """Work: make rollouts of these prompts with weights of this policy version or a newer one."""

    positions: tuple[int, ...]
    version: int
    era: int = 0
    """Number of rollbacks so far. Work requested in an earlier era is discarded."""
    records: tuple[int, ...] = ()
    """Record of each position. Empty without a sampler."""

    def __str__(self) -> str:
        return f"makes {len(self.positions)} prompts from {self.positions[0]}"


@dataclass(frozen=True, slots=True)
class EvaluationWork:
    """Work: answer the held-out prompts `start` to `stop` with weights of this version."""

    start: int
    stop: int
    version: int

    def __str__(self) -> str:
        return f"answers held-out prompts {self.start} to {self.stop}"


@dataclass(frozen=True, slots=True)
class RunOver:
    """Work: exit, since the run is over."""

    def __str__(self) -> str:
        return "ends"


Work = RolloutWork | EvaluationWork | RunOver


@dataclass(frozen=True, slots=True)
class TakenEpisode:
    """Samples, times and metrics of an episode, for a trainer."""

    groups: Sequence[StoredGroup]
    times: PhaseTimes
    """Phase times, averaged over the makers."""
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Event:
    """Hook event for another process. `arguments` are pickled, since the coordinator cannot unpickle them."""

    name: str
    arguments: bytes


@dataclass(frozen=True, slots=True)
class LogLine:
    """Line of an actor's log."""

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
    """Finished groups that wait to be trained on."""
    stuck: Mapping[str, str]
    """Makers that must be restarted -> reason."""
    silent: Mapping[str, str]
    """Trainers without a recent heartbeat -> description."""
    events: Sequence[Event | LogLine]
