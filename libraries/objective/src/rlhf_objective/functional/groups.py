"""Compares the answers to one prompt with each other.

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
    """[B] bool: the group holds two different scores."""


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
    """[B] float64: 1 / rows of the row's sample, so that a sample counts once."""
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
    """GRPO's advantage (Shao 2024): (r - mean) / (std + eps) of the sample's group, unbiased std.

    scores: [B]; group_ids: [B] integers. Returns [B] float32. `divide_by_std=False` is Dr. GRPO's (Liu 2025);
    with `leave_one_out` the mean is that of the others in the group. A group of one, or without spread, gives 0.
    sample_ids: [B] integers where a sample has several rows of one score: it enters its group once.
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
    """RLOO's advantage (Ahmadian 2024): r - mean of the others of its group.

    scores: [B]; group_ids: [B] integers; sample_ids as in `group_normalised`. Returns [B] float32; a group of one has
    no others and gives 0.
    """
    return group_normalised(scores, group_ids, sample_ids=sample_ids, divide_by_std=False, leave_one_out=True)


@dataclass(frozen=True, slots=True)
class GroupSpread:
    """Spread of the scores within a prompt's samples; a group without spread gives no learning signal."""

    std_mean: float
    """Mean over groups of the unbiased standard deviation."""
    without_spread_fraction: float
    """Share of groups in which all scores are equal, groups of one included."""


def group_spread(scores: Tensor, group_ids: Tensor, sample_ids: Tensor | None = None) -> GroupSpread:
    """scores: [B]; group_ids: [B] integers; at least one sample. sample_ids as in `group_normalised`."""
    groups = _groups(scores, group_ids, sample_ids)
    share = _shares(sample_ids, groups.size) / groups.size
    number = share.sum()
    std = (groups.sum_of_squares / (groups.size - 1).clamp(min=1)).sqrt()
    flat = torch.where(groups.has_spread, 0.0, share)
    return GroupSpread(float((std * share).sum() / number), float(flat.sum() / number))
