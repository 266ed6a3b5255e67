"""Warning about a run that cannot learn, because all answers to each prompt have equal scores in several episodes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlhf_core.episode_view import EpisodeView

from .functional.groups import group_spread

logger = logging.getLogger("rlhf")

PATIENCE = 3
"""Number of successive flat episodes before the warning."""
_HINT = (
    "read the run's samples; use prompts that the model sometimes solves, a reward with partial credit, "
    "a warm start, or a higher engine.temperature"
)


class FlatGroups:
    """Counts successive episodes in which no group has different scores, and warns at the third."""

    def __init__(self, estimator: Callable[..., Any] | None) -> None:
        """Start counting.

        Args:
            estimator: The run's advantage estimator. The warning is off if it does not compare answers.
        """
        self._compares_answers = getattr(estimator, "compares_answers", False)
        self._num_episodes = 0
        self._rewards: dict[str, list[Tensor]] = {}

    def see(self, episode: EpisodeView, advantages: Tensor, *, penalises_kl: bool) -> None:
        """Record the result of an episode.

        Args:
            episode: The episode, with scores of all rows.
            advantages: Result of the estimator, before whitening.
            penalises_kl: Whether rewards include a KL penalty, from which alone advantages may differ.
        """
        if not self._compares_answers:
            return
        if not _is_flat(episode.scores, episode) or (not penalises_kl and bool(advantages.any())):
            self._num_episodes, self._rewards = 0, {}
            return
        self._num_episodes += 1
        for name, values in episode.rewards.items() if self._num_episodes <= PATIENCE else ():
            self._rewards.setdefault(name, []).append(values)
        if self._num_episodes == PATIENCE and _is_first_rank():
            rewards = ", ".join(_described(name, torch.cat(seen)) for name, seen in self._rewards.items())
            logger.warning(
                "for %d episodes all answers to each prompt had equal scores, so every advantage is 0 and nothing "
                "can be learned from the rewards%s\n  -> %s",
                PATIENCE,
                f": {rewards}" if rewards else "",
                _HINT,
            )


def _is_flat(values: Tensor, episode: EpisodeView) -> bool:
    return group_spread(values, episode.group_ids, episode.row_sample_ids).without_spread_fraction == 1.0


def _described(name: str, seen: Tensor) -> str:
    low, high = float(seen.min()), float(seen.max())
    return f"{name} was always {low:.4g}" if low == high else f"{name} was {low:.4g} to {high:.4g}"


def _is_first_rank() -> bool:
    is_alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
    return is_alone or torch.distributed.get_rank() == 0
