"""Checks between the sections of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..util.did_you_mean import suggestion
from .load import ENVIRONMENT_SECTION
from .problems import Problems
from .selected import Configured, SelectedReward


def labels(given: Mapping[str, Any], rewards: Sequence[SelectedReward]) -> list[str]:
    """Names of a run's rewards; the environment's comes first."""
    return [*([ENVIRONMENT_SECTION] if ENVIRONMENT_SECTION in given else []), *(reward.name for reward in rewards)]


def check_score(path: str, evaluation: Any, known: Sequence[str], problems: Problems) -> None:
    """Add a problem where the `score` of an evaluation is none of the `known` rewards."""
    score = evaluation.get("score") if isinstance(evaluation, dict) else None
    if isinstance(score, str) and score not in known and not len(problems):
        problems.add(
            f"{path}.score", f'no reward "{score}" in this run{suggestion(score, known)} (rewards: {list(known)})'
        )


def check_curriculum(
    prompts: Configured | None, algorithm: Configured | None, known: Sequence[str], problems: Problems
) -> None:
    """Hold a curriculum against the algorithm and the `known` rewards."""
    options = getattr(prompts.config, "curriculum", None) if prompts is not None else None
    if options is None:
        return
    if algorithm is not None and algorithm.component.feeds != "rollouts":
        problems.add("prompts.curriculum", f"{algorithm.name} learns from a dataset: there is no answer to judge by")
    elif options.reward is not None and options.reward not in known and not len(problems):
        told = f'no reward "{options.reward}" in this run{suggestion(options.reward, known)} (rewards: {list(known)})'
        problems.add("prompts.curriculum.reward", told)
