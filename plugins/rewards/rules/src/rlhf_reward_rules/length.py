"""`length`: the length of the answer in tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal


def length(
    rollouts: Sequence[Any],
    *,
    target_tokens: int = 128,
    shape: Literal["peak", "at-most", "at-least", "shorter"] = "at-most",
) -> list[float]:
    """Score in [0, 1] of the number n of response tokens (EOS included).

    Args:
        rollouts: samples to score.
        target_tokens: the target, in tokens.
        shape: `peak`: 1 at the target, decreasing linearly to 0 at n = 0 and n = 2 * target. `at-most`: 1 up to the
            target, decreasing linearly to 0 at twice the target. `at-least`: min(1, n / target). `shorter`: 1 at n = 0,
            decreasing linearly to 0 at the target.

    Raises:
        ValueError: if `target_tokens` is below 1.

    Example:
        >>> from types import SimpleNamespace
        >>> answers = [SimpleNamespace(sampled_ids=range(n)) for n in (64, 160, 300)]
        >>> length(answers, target_tokens=128, shape="at-most")
        [1.0, 0.75, 0.0]
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
