"""What a transport brings to the loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from .prompts import PromptStream
from .protocols import ExperienceChannel, WeightSync


class Evaluator(Protocol):
    """Scores the newest published policy on held-out prompts. Collective."""

    def evaluate(self) -> Mapping[str, float]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionParts:
    """What a transport brings to the loop."""

    channel: ExperienceChannel | None
    """Where rollouts come from; None for an algorithm that is fed by a dataset."""
    prompts: PromptStream
    sync: WeightSync
    evaluator: Evaluator | None
    interrupted: Callable[[], bool]
    """Whether the user has asked the run to stop."""
