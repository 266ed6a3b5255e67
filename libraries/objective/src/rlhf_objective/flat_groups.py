"""Warns about a run that cannot learn: all answers to each prompt have equal scores, episode after episode."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlhf_core.whole import Whole

from .functional.groups import group_spread

logger = logging.getLogger("rlhf")

PATIENCE = 3
"""Flat episodes in a row before the warning."""
_HINT = (
    "read the run's samples; use prompts that the model sometimes solves, a reward with partial credit, "
    "a warm start, or a higher engine.temperature"
)


@dataclass(frozen=True, slots=True)
class _Range:
    """The values of one reward in the flat episodes so far."""

    low: float
    high: float
    varies_in_group: bool

    def describe(self) -> str:
        if self.low == self.high:
            return f"was always {self.low:.4g}"
        span = f"({self.low:.4g} to {self.high:.4g})"
        if self.varies_in_group:
            return f"varied {span}, but the combined scores did not"
        return f"was equal for all answers to a prompt {span}"


class FlatGroups:
    """Counts successive episodes without any difference within a group, and warns at the third."""

    def __init__(self, estimator: Callable[..., Any] | None) -> None:
        """`estimator`: the run's advantage estimator. One that does not compare answers is never warned about."""
        self._compares_answers = getattr(estimator, "compares_answers", False)
        self._num_episodes = 0
        self._ranges: dict[str, _Range] = {}

    def see(self, episode: Whole, advantages: Tensor, *, penalises_kl: bool) -> None:
        """Record the result of an episode.

        advantages: what the estimator returned, before any whitening. penalises_kl: whether the rewards contain a KL,
        by which alone advantages then differ.
        """
        if not self._compares_answers:
            return
        if not _is_flat(episode.scores, episode) or (not penalises_kl and bool(advantages.any())):
            self._num_episodes, self._ranges = 0, {}
            return
        self._num_episodes += 1
        for name, values in episode.rewards.items():
            self._ranges[name] = _widened(self._ranges.get(name), values, episode)
        if self._num_episodes == PATIENCE and _is_first_rank():
            rewards = ", ".join(f"{name} {each.describe()}" for name, each in self._ranges.items())
            logger.warning(
                "for %d episodes all answers to each prompt had equal scores, so every advantage is 0 and nothing "
                "can be learned from the rewards%s\n  -> %s",
                PATIENCE,
                f": {rewards}" if rewards else "",
                _HINT,
            )


def _is_flat(values: Tensor, episode: Whole) -> bool:
    return group_spread(values, episode.group_ids, episode.row_sample_ids).without_spread_fraction == 1.0


def _widened(before: _Range | None, values: Tensor, episode: Whole) -> _Range:
    here = _Range(float(values.min()), float(values.max()), not _is_flat(values, episode))
    if before is None:
        return here
    return replace(
        here,
        low=min(before.low, here.low),
        high=max(before.high, here.high),
        varies_in_group=before.varies_in_group or here.varies_in_group,
    )


def _is_first_rank() -> bool:
    is_alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
    return is_alone or torch.distributed.get_rank() == 0
