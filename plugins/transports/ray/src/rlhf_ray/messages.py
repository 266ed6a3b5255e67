"""Messages between the actors of a run. Plain values only, since the coordinator imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf_core.types import PhaseTimes

from .sample_store import StoredGroup

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class RolloutWork:
    """Make rollouts of these prompts, with weights of this policy version or a newer one."""

    positions: tuple[int, ...]
    version: int
    era: int = 0
    """Number of rollbacks so far; work requested in an earlier era is discarded."""
    records: tuple[int, ...] = ()
    """The record of each position, where a sampler has drawn them."""


@dataclass(frozen=True, slots=True)
class EvaluationWork:
    """Answer the held-out prompts `start` to `stop` with weights of this version."""

    start: int
    stop: int
    version: int


@dataclass(frozen=True, slots=True)
class RunOver:
    """There is no more work."""


Work = RolloutWork | EvaluationWork | RunOver


@dataclass(frozen=True, slots=True)
class Made:
    """A finished group; with `keep` False the algorithm rejects it and another replaces it."""

    group: StoredGroup
    keep: bool
    success: float | None = None
    """The judgement of the run's sampler."""


@dataclass(frozen=True, slots=True)
class TakenEpisode:
    """An episode as a trainer receives it."""

    groups: Sequence[StoredGroup]
    times: PhaseTimes
    """Phase times, averaged over the makers."""
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Canary:
    """The trainer's next-token log-probs on a few prompts, for makers to compare theirs with."""

    prompt_ids: Sequence[tuple[int, ...]]
    log_probs: np.ndarray[Any, Any]
    """[prompts, V] float32 next-token log-probs in nats, at temperature 1."""


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
    makers: Sequence[Mapping[str, Any]]
    trainers: Mapping[str, Mapping[str, Any]]
    """Name -> what it does."""
    queue: int
    """Groups that are finished and wait to be trained on."""
    owned: Mapping[str, int]
    """Maker -> groups whose samples are still needed, and go with its process."""
    sync_seconds: float | None
    """Time that the last version took to reach the makers; None before the first."""
    stuck: Mapping[str, str]
    """Makers to be restarted -> reason."""
    silent: Mapping[str, float]
    """Trainers without a heartbeat for too long -> seconds since the last."""
    events: Sequence[Event | LogLine]
