"""Advantage estimators with another baseline than the group's mean (`rlhf.advantages`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import rlhf_objective as objective  # loads torch only when it computes, not when options are read

from .score_norms import SCORE_NORM, ScoreNormPass

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf_core.episode_view import EpisodeView
    from rlhf_objective import AdvantageInput


@objective.needs("scalars", compares_answers=True)
def length_weighted(episode: EpisodeView) -> Tensor:
    """Reward - mean of its group weighted by length, on every token: the optimal baseline of OPO (Hao 2025).

    It has the smallest variance if the squared norm of an answer's score is proportional to its number of tokens.
    """
    import torch

    assert episode.totals is not None
    # The length of a sample is the sum over its rows, so each row counts with its own tokens.
    baseline = _group_mean(episode.totals, episode.group_ids, episode.lengths.double())
    has_spread = _has_spread(episode.totals, episode.group_ids)
    return torch.where(has_spread, episode.totals.double() - baseline, 0.0).float()


@objective.rewards_from_zero
@objective.needs("scalars", compares_answers=True)
def max_likelihood(episode: EpisodeView) -> Tensor:
    """(Reward - mean of its group) / mean of its group, on every token (MaxRL, Tajwar 2026, algorithm 1).

    For rewards of 0 and 1: with N answers it follows the gradient of log(probability of a right answer), expanded to
    order N. A group with a negative reward, or without a positive one, has advantage 0.
    """
    import torch

    assert episode.totals is not None
    shares = _shares(episode.row_sample_ids, episode.group_ids)
    mean = _group_mean(episode.totals, episode.group_ids, shares)
    lowest = _extreme(episode.totals, episode.group_ids, "amin")
    is_defined = _has_spread(episode.totals, episode.group_ids) & (lowest >= 0)
    divisor = torch.where(is_defined, mean, 1.0)
    return torch.where(is_defined, (episode.totals.double() - mean) / divisor, 0.0).float()


@objective.uses_pass(ScoreNormPass)
@objective.needs("episode", compares_answers=True)
def optimal_token(rows: AdvantageInput, *, tail_baseline: bool = False) -> Tensor:
    """Reward-to-go minus a baseline for each position: the optimal token baseline (Li 2026).

    The baseline of the t-th sampled token is the mean reward-to-go of the answers to the prompt that have one, weighted
    by the summed squared norms of their scores up to it (with respect to the logits). Tokens that only the longest
    answer has are not compared, and have baseline 0. With `tail_baseline` they have advantage 0.
    """
    import torch

    mask = rows.mask
    to_go = objective.rewards_to_go(rows.rewards, mask).double()[mask]
    energy = torch.where(mask, rows.columns[SCORE_NORM], 0.0).double().cumsum(-1)
    energy = energy * _shares(rows.sample_ids, rows.group_ids).unsqueeze(-1)
    # Ids that are equal for tokens of the same group and place, counted over the sampled tokens of a row.
    place = mask.long().cumsum(-1)
    slots = (torch.unique(rows.group_ids, return_inverse=True)[1].unsqueeze(-1) * (mask.shape[-1] + 1) + place)[mask]
    baseline = _group_mean(to_go, slots, energy[mask])
    if not tail_baseline:
        samples = torch.arange(len(mask)) if rows.sample_ids is None else rows.sample_ids
        pairs = torch.unique(torch.stack([slots, samples.unsqueeze(-1).expand_as(place)[mask]]), dim=1)
        known, count = torch.unique(pairs[0], return_counts=True)  # number of answers at each place
        baseline = torch.where(count[torch.searchsorted(known, slots)] > 1, baseline, 0.0)
    advantages = torch.zeros(mask.shape, dtype=torch.float64)
    advantages[mask] = to_go - baseline
    return torch.where(_has_spread(rows.totals, rows.group_ids).unsqueeze(-1), advantages, 0.0).float()


def _shares(sample_ids: Tensor | None, like: Tensor) -> Tensor:
    """[B] float64: 1 / number of rows of the row's sample, so that a sample counts once."""
    import torch

    if sample_ids is None:
        return torch.ones(like.shape, dtype=torch.float64)
    _, sample, count = torch.unique(sample_ids, return_inverse=True, return_counts=True)
    return torch.reciprocal(count[sample].double())


def _group_mean(values: Tensor, group_ids: Tensor, weights: Tensor) -> Tensor:
    """[N] float64: weighted mean of each entry's group, or 0 for a group without weight."""
    import torch

    ids, group = torch.unique(group_ids, return_inverse=True)
    empty = torch.zeros(ids.numel(), dtype=torch.float64)
    total = empty.index_add(0, group, weights)
    return (empty.index_add(0, group, weights * values.double()) / torch.where(total > 0, total, 1.0))[group]


def _has_spread(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """[B] bool: whether two samples of the row's group have different rewards."""
    return _extreme(rewards, group_ids, "amax") > _extreme(rewards, group_ids, "amin")


def _extreme(rewards: Tensor, group_ids: Tensor, which: str) -> Tensor:
    """[B]: the largest (amax) or smallest (amin) reward of the row's group."""
    import torch

    ids, group = torch.unique(group_ids, return_inverse=True)
    empty = torch.zeros(ids.numel(), dtype=rewards.dtype)
    return empty.scatter_reduce(0, group, rewards, which, include_self=False)[group]
