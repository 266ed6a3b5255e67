"""What the actors of a run say to each other. Plain values only: the coordinator, in the middle, imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf_core.types import PhaseTimes

from .wire import PackedGroup

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class RolloutWork:
    """Make these prompts, with weights of this policy version or a newer one."""

    positions: tuple[int, ...]
    version: int
    era: int = 0
    """Times the run went back to a checkpoint before; what an earlier era asked for is not wanted any more."""


@dataclass(frozen=True, slots=True)
class EvaluationWork:
    """Answer the held-out prompts `start` to `stop` with weights of this version."""

    start: int
    stop: int
    version: int


@dataclass(frozen=True, slots=True)
class RunOver:
    """There is nothing more to make."""


Work = RolloutWork | EvaluationWork | RunOver


@dataclass(frozen=True, slots=True)
class Made:
    """A finished group; `keep` False: the algorithm has no use for it and wants another in its place."""

    group: PackedGroup
    keep: bool


@dataclass(frozen=True, slots=True)
class TakenEpisode:
    """What a trainer gets of an episode."""

    groups: Sequence[PackedGroup]
    times: PhaseTimes
    """Of an average maker."""
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Canary:
    """What the trainer's model says behind a few prompts, for makers to compare with."""

    prompt_ids: Sequence[tuple[int, ...]]
    log_probs: np.ndarray[Any, Any]
    """[prompts, V] float32 nats, of the next token at temperature 1."""


@dataclass(frozen=True, slots=True)
class Event:
    """A hook's event in another process: `arguments` pickled, since the coordinator cannot read them."""

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
    """A moment of the run, for the driver and for `rlhf ray status`."""

    version: int
    progress: str
    makers: Sequence[Mapping[str, Any]]
    stuck: Mapping[str, str]
    """Makers to be started anew, and why."""
    silent: Mapping[str, float]
    """Trainers that gave no sign of life for too long, and for how many seconds."""
    events: Sequence[Event | LogLine]
