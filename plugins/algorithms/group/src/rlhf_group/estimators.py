"""Advantage estimators without a critic (`rlhf.advantages`): float32 [B] per row, or [B, A] with 0 outside the mask."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

import rlhf_forward  # loads torch only when it computes, not when options are read
import rlhf_objective as objective

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf_core.episode_view import EpisodeView
    from rlhf_objective import AdvantageInput


@objective.needs("scalars", compares_answers=True)
def group_normalised(episode: EpisodeView, *, divide_by_std: bool = True, leave_one_out: bool = False) -> Tensor:
    """(reward - mean of its group) / standard deviation of its group, on every token (Shao 2024).

    `divide_by_std=False` is Dr. GRPO (Liu 2025).
    """
    assert episode.totals is not None
    return objective.group_normalised(
        episode.totals,
        episode.group_ids,
        sample_ids=episode.row_sample_ids,
        divide_by_std=divide_by_std,
        leave_one_out=leave_one_out,
    )


@objective.needs("scalars", compares_answers=True)
def leave_one_out(episode: EpisodeView) -> Tensor:
    """Reward - mean of the other rewards in its group, on every token (Ahmadian 2024)."""
    return group_normalised(episode, divide_by_std=False, leave_one_out=True)


@objective.needs("row")
def reward_to_go(rows: AdvantageInput, *, gamma: Annotated[float, Field(ge=0, le=1)] = 1.0) -> Tensor:
    """Sum of the rewards from each token on, whitened over all tokens of the episode (Hu 2025)."""
    return rlhf_forward.masked_whiten(
        objective.rewards_to_go(rows.rewards, rows.mask, gamma), rows.mask, all_reduce=rows.all_reduce
    )


@objective.needs("row", greedy_answer=True)
def remax(rows: AdvantageInput) -> Tensor:
    """Sum of the rewards from each token on, minus the score of the greedy answer to the prompt (ReMax, Li 2023).

    The current policy generates the greedy answer, one more answer per prompt. Its score includes neither KL nor length
    penalty.
    """
    assert rows.greedy_scores is not None
    return (objective.rewards_to_go(rows.rewards, rows.mask) - rows.greedy_scores.unsqueeze(-1)) * rows.mask


@objective.needs("scalars", compares_answers=True)
def group_whitened(episode: EpisodeView) -> Tensor:
    """Reward - mean of its group on every token, whitened over the episode (REINFORCE++-baseline, Hu 2025)."""
    return rlhf_forward.whiten_by_counts(group_normalised(episode, divide_by_std=False), episode.lengths)


@objective.needs("scalars", compares_answers=True)
def gdpo(episode: EpisodeView, *, divide_by_std: bool = True, leave_one_out: bool = False) -> Tensor:
    """Normalize each reward in its group, then weight, sum, and whiten over the episode (GDPO, Liu 2026).

    Thus a reward of small spread is not dominated by one of large spread. A length penalty is a reward of weight 1. A
    KL penalty in the reward is only centered, because its initial spread is rounding error. `reward_scaling` scales
    sums of rewards and does not apply here.
    """
    import torch

    total = torch.zeros_like(episode.scores)
    for name, reward in episode.rewards.items():
        part = objective.group_normalised(
            reward,
            episode.group_ids,
            sample_ids=episode.row_sample_ids,
            divide_by_std=divide_by_std and name != objective.KL_PENALTY,
            leave_one_out=leave_one_out,
        )
        total = total + episode.weights.get(name, 1.0) * part
    return rlhf_forward.whiten_by_counts(total, episode.lengths)


@objective.needs("scalars", compares_answers=True)
def pass_at_k(episode: EpisodeView, *, divide_by_std: bool = True) -> Tensor:
    """The group's best reward minus the best of the others: its gradient is that of max@k (Tang 2025).

    k is train.samples_per_prompt. Only a unique best answer of a group has a nonzero advantage.
    """
    import torch

    assert episode.totals is not None
    _, sample = torch.unique(episode.sample_ids, return_inverse=True)
    _, group_of_row = torch.unique(episode.group_ids, return_inverse=True)
    count = int(sample.max()) + 1
    group = torch.zeros(count, dtype=torch.int64).scatter(0, sample, group_of_row)
    reward = torch.zeros(count, dtype=torch.float64).scatter(0, sample, episode.totals.double())
    lowest = torch.full((int(group.max()) + 1,), -torch.inf, dtype=torch.float64)
    is_best = reward == lowest.scatter_reduce(0, group, reward, "amax")[group]
    others = lowest.scatter_reduce(0, group, torch.where(is_best, -torch.inf, reward), "amax")[group]
    num_best = torch.zeros_like(lowest).index_add(0, group, is_best.double())[group]
    gain = torch.where(is_best & (num_best == 1) & others.isfinite(), reward - others, 0.0)[sample]
    if divide_by_std:
        ids = episode.row_sample_ids
        centered = objective.group_normalised(episode.totals, episode.group_ids, sample_ids=ids, divide_by_std=False)
        scaled = objective.group_normalised(
            episode.totals, episode.group_ids, sample_ids=ids
        )  # centered / (deviation + 1e-6)
        gain = torch.where(gain > 0, gain * scaled / centered, 0.0)
    return gain.float()
