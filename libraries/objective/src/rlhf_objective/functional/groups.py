"""Comparison of the answers to one prompt with each other.

Everything is computed in float64 and returned as float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class _Groups:
    """Statistics of each sample's group, [B] float64, aligned with the samples."""

    centred: Tensor
    size: Tensor
    sum_of_squares: Tensor
    has_spread: Tensor
    """[B] bool: whether the group has two different scores."""


def _groups(scores: Tensor, group_ids: Tensor, sample_ids: Tensor | None) -> _Groups:
    exact = scores.double()
    ids, group = torch.unique(group_ids, return_inverse=True)
    empty = torch.zeros(ids.numel(), dtype=torch.float64, device=scores.device)
    share = _shares(sample_ids, exact)
    size = empty.index_add(0, group, share)
    mean = empty.index_add(0, group, exact * share) / size
    centred = exact - mean[group]
    squares = empty.index_add(0, group, centred.square() * share)
    highest = empty.scatter_reduce(0, group, exact, "amax", include_self=False)
    lowest = empty.scatter_reduce(0, group, exact, "amin", include_self=False)
    return _Groups(centred, size[group], squares[group], (highest > lowest)[group])


def _shares(sample_ids: Tensor | None, like: Tensor) -> Tensor:
    """[B] float64: 1 / number of rows of the row's sample, so that a sample counts once."""
    if sample_ids is None:
        return torch.ones_like(like)
    _, sample, rows = torch.unique(sample_ids, return_inverse=True, return_counts=True)
    return torch.reciprocal(rows[sample].to(like))


def group_normalised(
    scores: Tensor,
    group_ids: Tensor,
    *,
    sample_ids: Tensor | None = None,
    divide_by_std: bool = True,
    leave_one_out: bool = False,
    eps: float = 1e-6,
) -> Tensor:
    """GRPO's advantage (Shao 2024): (r - mean) / (std + eps) in the sample's group, with the unbiased std.

    Args:
        scores: [B] float, the score of each row's sample.
        group_ids: [B] int, equal for samples of one prompt.
        sample_ids: [B] int, the sample of each row, if samples have several rows. Each sample counts once in its group.
        divide_by_std: False is Dr. GRPO's advantage (Liu 2025).
        leave_one_out: Whether the mean is over the other samples of the group.
        eps: Added to the std.

    Returns:
        [B] float32, 0 in groups of one and in groups with equal scores.

    Example:
        >>> scores, groups = torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1])
        >>> group_normalised(scores, groups)  # mean 0.5, std 0.7071, and a group without spread
        tensor([ 0.7071, -0.7071,  0.0000,  0.0000])
    """
    groups = _groups(scores, group_ids, sample_ids)
    advantages = groups.centred
    if leave_one_out:
        # r - (sum - r) / (n - 1) = (r - mean) n / (n - 1)
        advantages = advantages * groups.size / (groups.size - 1).clamp(min=1)
    if divide_by_std:
        std = (groups.sum_of_squares / (groups.size - 1).clamp(min=1)).sqrt()
        advantages = advantages / (std + eps)
    return torch.where(groups.has_spread, advantages, 0.0).float()


def leave_one_out(scores: Tensor, group_ids: Tensor, sample_ids: Tensor | None = None) -> Tensor:
    """RLOO's advantage (Ahmadian 2024): r - mean of the other samples of the group.

    Args:
        scores, group_ids, sample_ids: As for `group_normalised`.

    Returns:
        [B] float32, 0 in groups of one.

    Example:
        >>> leave_one_out(torch.tensor([1.0, 0.0, 0.5]), torch.tensor([0, 0, 0]))  # 1 - 0.25, 0 - 0.75, 0.5 - 0.5
        tensor([ 0.7500, -0.7500,  0.0000])
    """
    return group_normalised(scores, group_ids, sample_ids=sample_ids, divide_by_std=False, leave_one_out=True)


@dataclass(frozen=True, slots=True)
class GroupSpread:
    """Spread of the scores within groups. A group without spread provides no learning signal."""

    std_mean: float
    """Mean over groups of the unbiased standard deviation."""
    without_spread_fraction: float
    """Fraction of groups in which all scores are equal, including groups of one."""


def group_spread(scores: Tensor, group_ids: Tensor, sample_ids: Tensor | None = None) -> GroupSpread:
    """Measure the spread of scores within groups.

    Args:
        scores, group_ids, sample_ids: As for `group_normalised`, at least one sample.

    Returns:
        Mean standard deviation, and fraction of groups without spread.

    Example:
        >>> group_spread(torch.tensor([3.0, 1.0, 2.0, 2.0]), torch.tensor([0, 0, 1, 1])).without_spread_fraction
        0.5
    """
    groups = _groups(scores, group_ids, sample_ids)
    share = _shares(sample_ids, groups.size) / groups.size
    number = share.sum()
    std = (groups.sum_of_squares / (groups.size - 1).clamp(min=1)).sqrt()
    flat = torch.where(groups.has_spread, 0.0, share)
    return GroupSpread(float((std * share).sum() / number), float(flat.sum() / number))
