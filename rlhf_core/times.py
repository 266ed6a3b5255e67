"""What a maker's time was spent on, and the amounts made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


def sum_by_key(counts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Sum of the mappings' values per key, keys in order of first appearance."""
    keys = dict.fromkeys(key for each in counts for key in each)
    return {key: sum(each.get(key, 0.0) for each in counts) for key in keys}


@dataclass(slots=True)
class PhaseTimes:
    """Seconds spent on making experience, and the amounts made."""

    rollout_s: float = 0.0
    environment_s: float = 0.0
    """Time that the engine waited for environments."""
    reward_s: float = 0.0
    """Wait after generation only: rewards are scored while later answers are generated."""
    forward_s: float = 0.0
    """Reference log-probs and values."""
    response_tokens: int = 0
    reward_calls: dict[str, float] = field(default_factory=dict)
    """`reward_calls/<name>/<count>`: what each reward cost, as `RewardScorer.take_metrics` tells it."""

    def add(self, other: PhaseTimes) -> None:
        for name in ("rollout_s", "environment_s", "reward_s", "forward_s", "response_tokens"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.reward_calls = sum_by_key([self.reward_calls, other.reward_calls])
