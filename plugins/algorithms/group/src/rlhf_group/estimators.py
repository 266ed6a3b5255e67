"""Advantage estimators without a critic (`rlhf.advantages`): a whole episode to [B, A] float32, 0 outside the mask."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

if TYPE_CHECKING:  # checking a run file reads the options below; only estimates need torch
    from torch import Tensor

    from rlhf_core.functional import AdvantageInput


def group_normalised(episode: AdvantageInput, *, divide_by_std: bool = True, leave_one_out: bool = False) -> Tensor:
    """(reward - mean of its group) / deviation of its group, on every token (Shao 2024; Liu 2025 does not divide)."""
    from rlhf_core.functional import group_normalised as normalised
    from rlhf_core.functional import to_tokens

    values = normalised(
        episode.totals,
        episode.group_ids,
        sample_ids=episode.sample_ids,
        divide_by_std=divide_by_std,
        leave_one_out=leave_one_out,
    )
    return to_tokens(values, episode.mask)


def leave_one_out(episode: AdvantageInput) -> Tensor:
    """reward - mean of the others in its group, on every token (Ahmadian 2024)."""
    from rlhf_core.functional import leave_one_out as less_the_others
    from rlhf_core.functional import to_tokens

    return to_tokens(less_the_others(episode.totals, episode.group_ids, episode.sample_ids), episode.mask)


def reward_to_go(episode: AdvantageInput, *, gamma: Annotated[float, Field(ge=0, le=1)] = 1.0) -> Tensor:
    """Sum of the rewards from each token on, whitened over all tokens of the episode (Hu 2025)."""
    from rlhf_core.functional import masked_whiten, rewards_to_go

    return masked_whiten(rewards_to_go(episode.rewards, episode.mask, gamma), episode.mask)


def group_whitened(episode: AdvantageInput) -> Tensor:
    """reward - mean of its group on every token, whitened over the episode (REINFORCE++-baseline, Hu 2025)."""
    from rlhf_core.functional import group_normalised as normalised
    from rlhf_core.functional import masked_whiten, to_tokens

    values = normalised(episode.totals, episode.group_ids, sample_ids=episode.sample_ids, divide_by_std=False)
    return masked_whiten(to_tokens(values, episode.mask), episode.mask)
