"""`length`: how long the answer is, in tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal


def length(
    rollouts: Sequence[Any],
    *,
    target_tokens: int = 128,
    shape: Literal["peak", "at-most", "at-least", "shorter"] = "at-most",
) -> list[float]:
    """A score in [0, 1] from n, the number of response tokens (EOS included).

    `peak`: 1 at the target, falling linearly to 0 at none and at twice the target. `at-most`: 1 up to the
    target, falling linearly to 0 at twice it. `at-least`: n / target, 1 from the target on. `shorter`: 1 for no
    token, falling linearly to 0 at the target.
    """
    if target_tokens < 1:
        raise ValueError(f"target_tokens must be at least 1, got {target_tokens}")
    return [_score(len(rollout.sampled_ids) / target_tokens, shape) for rollout in rollouts]


def _score(ratio: float, shape: str) -> float:
    if shape == "peak":
        return max(0.0, 1.0 - abs(ratio - 1.0))
    if shape == "at-most":
        return min(1.0, max(0.0, 2.0 - ratio))
    if shape == "at-least":
        return min(1.0, ratio)
    return max(0.0, 1.0 - ratio)
