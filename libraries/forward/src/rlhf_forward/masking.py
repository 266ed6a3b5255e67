"""Sums, means and variances under a mask.

Values under a False mask, including NaN and infinity, never reach a result or a gradient: they are replaced with
`where`, not multiplied by zero. The result of an empty mask is 0. Sums are accumulated in float64 and returned in the
dtype of the values.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlhf_core.episode_view import single_rank


def sum64(values: Tensor, mask: Tensor, dim: int | None) -> Tensor:
    """`masked_sum` in float64."""
    return torch.where(mask, values, 0.0).sum(dim, dtype=torch.float64)


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum values over the True positions of a mask.

    Args:
        values: Floating-point values of any shape.
        mask: bool, of the same shape.
        dim: Dimension to reduce. None reduces all.

    Returns:
        Sums in the dtype of `values`.

    Example:
        >>> masked_sum(torch.tensor([1.0, 3.0, float("nan")]), torch.tensor([True, True, False]))
        tensor(4.)
    """
    return sum64(values, mask, dim).to(values.dtype)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Average values over the True positions of a mask.

    Args:
        values: Floating-point values of any shape.
        mask: bool, of the same shape.
        dim: Dimension to reduce. None reduces all.

    Returns:
        Means in the dtype of `values`, 0 without True positions.

    Example:
        >>> mask = torch.tensor([[True, True], [False, False]])
        >>> masked_mean(torch.tensor([[1.0, 3.0], [5.0, 7.0]]), mask, dim=-1)
        tensor([2., 0.])
    """
    return (sum64(values, mask, dim) / mask.sum(dim).clamp(min=1)).to(values.dtype)


Reduce = Callable[[Tensor], Tensor]
"""Sums a float64 tensor over ranks, each of which holds a part of the values. Collective."""


def mean_over_ranks(values: Tensor, mask: Tensor, all_reduce: Reduce) -> Tensor:
    """Average values over the True positions of all ranks. Collective.

    Args:
        values: This rank's floating-point values, of any shape.
        mask: bool, of the same shape.
        all_reduce: Sums over ranks. Called once.

    Returns:
        Scalar in the dtype of `values`, the same on every rank. 0 without True positions.
    """
    return sum_and_mean_over_ranks(values, mask, all_reduce)[1]


def sum_and_mean_over_ranks(values: Tensor, mask: Tensor, all_reduce: Reduce) -> tuple[Tensor, Tensor]:
    """`masked_sum` and `masked_mean` over the True positions of all ranks. Calls `all_reduce` once."""
    total, count = _totals(values, mask, all_reduce)
    return total.to(values.dtype), (total / count).to(values.dtype)


def _totals(values: Tensor, mask: Tensor, all_reduce: Reduce) -> tuple[Tensor, Tensor]:
    """Sum and count (at least 1) of the True positions of all ranks."""
    total, count = all_reduce(torch.stack([sum64(values, mask, None), mask.sum().double()])).unbind()
    return total, count.clamp(min=1)


def var_over_ranks(values: Tensor, mask: Tensor, all_reduce: Reduce) -> Tensor:
    """Biased variance (divided by the count) over the True positions of all ranks, 0 for an empty mask.

    Calls `all_reduce` twice.
    """
    return _centred_and_var64(values, mask, all_reduce)[1].to(values.dtype)


def masked_whiten(values: Tensor, mask: Tensor, eps: float = 1e-8, *, all_reduce: Reduce = single_rank) -> Tensor:
    """Whiten values: (x - mean) / sqrt(var + eps), with the biased variance of the True positions.

    Args:
        values: Floating-point values of any shape.
        mask: bool, of the same shape.
        eps: Added to the variance.
        all_reduce: Sums over ranks, for statistics over the True positions of all ranks. Called twice.

    Returns:
        Whitened values in the dtype of `values`, 0 under a False mask.

    Example:
        >>> masked_whiten(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False]))  # mean 2, variance 1
        tensor([-1.,  1.,  0.])
    """
    centred, var = _centred_and_var64(values, mask, all_reduce)
    return torch.where(mask, centred * torch.rsqrt(var + eps), 0.0).to(values.dtype)


def _centred_and_var64(values: Tensor, mask: Tensor, all_reduce: Reduce) -> tuple[Tensor, Tensor]:
    """Deviations from the mean, and their mean square, over the True positions of all ranks."""
    total, count = _totals(values, mask, all_reduce)
    centred = torch.where(mask, values, 0.0).double() - total / count
    return centred, all_reduce(sum64(centred.square(), mask, None).unsqueeze(0)).squeeze(0) / count


def whiten_by_counts(values: Tensor, counts: Tensor, eps: float = 1e-8) -> Tensor:
    """Whiten values that each apply to several positions, as `masked_whiten` over all these positions.

    Args:
        values: [B] float, a value per row.
        counts: [B] int, number of positions of each row.
        eps: Added to the variance.

    Returns:
        [B] in the dtype of `values`.

    Example:
        >>> whiten_by_counts(torch.tensor([1.0, 3.0]), torch.tensor([1, 3]))  # mean 2.5, variance 0.75
        tensor([-1.7321,  0.5774])
    """
    exact, weights = values.double(), counts.double()
    total = weights.sum().clamp(min=1)
    centred = exact - (exact * weights).sum() / total
    var = (centred.square() * weights).sum() / total
    return (centred * torch.rsqrt(var + eps)).to(values.dtype)


def last_true_index(mask: Tensor) -> Tensor:
    """[B, A] bool -> [B] int64: index of the last True of each row, -1 for a row of False."""
    places = torch.arange(1, mask.shape[-1] + 1, device=mask.device)
    if mask.shape[-1] == 0:
        return torch.full(mask.shape[:-1], -1, dtype=torch.int64, device=mask.device)
    return (mask * places).amax(-1) - 1


def mask_from_lengths(lengths: Tensor, size: int) -> Tensor:
    """Return a mask that is True on the first positions of each row.

    Args:
        lengths: [B] int, number of True positions.
        size: Width of the mask.

    Returns:
        [B, size] bool.

    Example:
        >>> mask_from_lengths(torch.tensor([1, 3]), 3).int().tolist()
        [[1, 0, 0], [1, 1, 1]]
    """
    return torch.arange(size, device=lengths.device) < lengths.unsqueeze(-1)


def position_ids_of(attention_mask: Tensor) -> Tensor:
    """[B, S] bool -> [B, S] int64: index of each real token among the real tokens, 0 on left padding."""
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def turn_ids(mask: Tensor) -> Tensor:
    """[B, A] action mask -> [B, A] int64: index of the run of True positions that a token is in, -1 under False.

    Two turns of the policy are always separated, at least by the tokens that close and open a message.
    """
    before = torch.nn.functional.pad(mask, (1, 0))[:, :-1]
    return torch.where(mask, (mask & ~before).long().cumsum(-1) - 1, -1)


def to_tokens(values: Tensor, mask: Tensor) -> Tensor:
    """Expand a value per row to the True positions of its mask.

    Args:
        values: [B] float.
        mask: [B, A] bool.

    Returns:
        [B, A] in the dtype of `values`, 0 under a False mask.

    Example:
        >>> to_tokens(torch.tensor([0.5]), torch.tensor([[True, True, False]]))
        tensor([[0.5000, 0.5000, 0.0000]])
    """
    return torch.where(mask, values.unsqueeze(-1), 0.0)
