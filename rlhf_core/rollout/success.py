"""Success of a prompt's answers, as a curriculum counts it."""

from __future__ import annotations

from collections.abc import Callable

from ..config.sections import CurriculumConfig
from ..types import RolloutGroup


def success_of(options: CurriculumConfig | None) -> Callable[[RolloutGroup], float | None]:
    """For a group, the share of its samples whose score is a success; None without a curriculum, or a sample."""

    def share(group: RolloutGroup) -> float | None:
        samples = [item.rewards for item in group.items if item.branch == 0]
        if options is None or not samples:
            return None
        name = options.reward or next(iter(samples[0]))
        return sum(rewards[name] >= options.success_score for rewards in samples) / len(samples)

    return share
