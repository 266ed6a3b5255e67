"""Advantage estimators without a critic (`rlhf.advantages`): float32 [B] per row, or [B, A] with 0 outside the mask."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from rlhf_core.algorithm import needs

if TYPE_CHECKING:  # checking a run file reads the options below; only estimates need torch
    from torch import Tensor

    from rlhf_core.functional import AdvantageInput
    from rlhf_core.whole import EpisodeScalars


@needs("scalars")
def group_normalised(episode: EpisodeScalars, *, divide_by_std: bool = True, leave_one_out: bool = False) -> Tensor:
    """(reward - mean of its group) / deviation of its group, on every token (Shao 2024; Liu 2025 does not divide)."""
    from rlhf_core.functional import group_normalised as normalised

    assert episode.totals is not None
    return normalised(
        episode.totals,
        episode.group_ids,
        sample_ids=episode.row_sample_ids,
        divide_by_std=divide_by_std,
        leave_one_out=leave_one_out,
    )


@needs("scalars")
def leave_one_out(episode: EpisodeScalars) -> Tensor:
    """reward - mean of the others in its group, on every token (Ahmadian 2024)."""
    return group_normalised(episode, divide_by_std=False, leave_one_out=True)


@needs("row")
def reward_to_go(rows: AdvantageInput, *, gamma: Annotated[float, Field(ge=0, le=1)] = 1.0) -> Tensor:
    """Sum of the rewards from each token on, whitened over all tokens of the episode (Hu 2025)."""
    from rlhf_core.functional import masked_whiten, rewards_to_go

    return masked_whiten(rewards_to_go(rows.rewards, rows.mask, gamma), rows.mask, all_reduce=rows.all_reduce)


@needs("scalars")
def group_whitened(episode: EpisodeScalars) -> Tensor:
    """reward - mean of its group on every token, whitened over the episode (REINFORCE++-baseline, Hu 2025)."""
    from rlhf_core.functional import whitened_by_counts

    return whitened_by_counts(group_normalised(episode, divide_by_std=False), episode.lengths)
