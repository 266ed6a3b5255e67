"""Which reward a run's held-out score is the mean of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .load import ENVIRONMENT_SECTION


def score_name(run: Mapping[str, Any]) -> str | None:
    """The label of the reward behind `eval/score` of a resolved run file; None where there is none."""
    evaluation, rewards = run.get("eval"), run.get("rewards")
    chosen = evaluation.get("score") if isinstance(evaluation, Mapping) else None
    if isinstance(chosen, str):
        return chosen
    if run.get(ENVIRONMENT_SECTION):
        return ENVIRONMENT_SECTION
    first = rewards[0] if isinstance(rewards, list | tuple) and rewards else None
    label = first.get("label") if isinstance(first, Mapping) else None
    return label if isinstance(label, str) else None
