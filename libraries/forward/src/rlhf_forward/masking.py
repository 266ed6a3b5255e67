"""Sums, means and variances under a mask, and the aggregation of per-token losses.

Values under a False mask never reach a result or a gradient, NaN and infinity included: they are replaced with
`where`, never multiplied by zero. An empty mask gives 0. Sums are accumulated in float64 and returned in the dtype of
the values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from rlhf_core.episode_view import single_rank

Aggregation = Literal[
    "token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "sequence-mean-token-sum-norm"
]
"""How token losses are averaged: over all tokens, or over sequences of their tokens' mean, sum, or sum over a
constant length (Dr. GRPO, Liu 2025)."""


def _sum64(values: Tensor, mask: Tensor, dim: int | None) -> Tensor:
    return torch.where(mask, values, 0.0).sum(dim, dtype=torch.float64)


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of `values` where `mask` (same shape) is True, over `dim` or over everything."""
    return _sum64(values, mask, dim).to(values.dtype)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of `values` where `mask` (same shape) is True; 0 where nothing is."""
    return (_sum64(values, mask, dim) / mask.sum(dim).clamp(min=1)).to(values.dtype)


Reduce = Callable[[Tensor], Tensor]
"""Adds up a float64 tensor over ranks, of which each holds a part of the values. Collective."""


def mean_over_ranks(values: Tensor, mask: Tensor, all_reduce: Reduce) -> Tensor:
    """`masked_mean` over the True positions of all ranks. Calls `all_reduce` once."""
    return sum_and_mean_over_ranks(values, mask, all_reduce)[1]


def sum_and_mean_over_ranks(values: Tensor, mask: Tensor, all_reduce: Reduce) -> tuple[Tensor, Tensor]:
    """`masked_sum` and `masked_mean` over the True positions of all ranks. Calls `all_reduce` once."""
    total, count = _totals(values, mask, all_reduce)
    return total.to(values.dtype), (total / count).to(values.dtype)


def _totals(values: Tensor, mask: Tensor, all_reduce: Reduce) -> tuple[Tensor, Tensor]:
    """Sum and count (at least 1) of the True positions of all ranks."""
    total, count = all_reduce(torch.stack([_sum64(values, mask, None), mask.sum().double()])).unbind()
    return total, count.clamp(min=1)


def var_over_ranks(values: Tensor, mask: Tensor, all_reduce: Reduce) -> Tensor:
    """Biased variance (divided by the count) over the True positions of all ranks, 0 if there is none.

    Calls `all_reduce` twice.
    """
    return _centred_and_var64(values, mask, all_reduce)[1].to(values.dtype)


def masked_whiten(values: Tensor, mask: Tensor, eps: float = 1e-8, *, all_reduce: Reduce = single_rank) -> Tensor:
    """(x - mean) / sqrt(var + eps) over all True positions, biased variance; 0 under a False mask.

    Over those of all ranks with `all_reduce`, which is called twice.
    """
    centred, var = _centred_and_var64(values, mask, all_reduce)
    return torch.where(mask, centred * torch.rsqrt(var + eps), 0.0).to(values.dtype)


def _centred_and_var64(values: Tensor, mask: Tensor, all_reduce: Reduce) -> tuple[Tensor, Tensor]:
    """Distances from the mean, and their mean square, over the True positions of all ranks."""
    total, count = _totals(values, mask, all_reduce)
    centred = torch.where(mask, values, 0.0).double() - total / count
    return centred, all_reduce(_sum64(centred.square(), mask, None).unsqueeze(0)).squeeze(0) / count


def whiten_by_counts(values: Tensor, counts: Tensor, eps: float = 1e-8) -> Tensor:
    """[B] values that each stand on `counts` [B] positions, whitened over all positions (see `masked_whiten`)."""
    exact, weights = values.double(), counts.double()
    total = weights.sum().clamp(min=1)
    centred = exact - (exact * weights).sum() / total
    var = (centred.square() * weights).sum() / total
    return (centred * torch.rsqrt(var + eps)).to(values.dtype)


def last_true_index(mask: Tensor) -> Tensor:
    """[B, A] bool -> [B] int64: index of the last True of each row, -1 where there is none."""
    places = torch.arange(1, mask.shape[-1] + 1, device=mask.device)
    if mask.shape[-1] == 0:
        return torch.full(mask.shape[:-1], -1, dtype=torch.int64, device=mask.device)
    return (mask * places).amax(-1) - 1


def mask_from_lengths(lengths: Tensor, size: int) -> Tensor:
    """[B] integer lengths -> [B, size] bool, True on the first `length` positions of each row."""
    return torch.arange(size, device=lengths.device) < lengths.unsqueeze(-1)


def position_ids_of(attention_mask: Tensor) -> Tensor:
    """[B, S] bool -> [B, S] int64: each real token's index among the real tokens; 0 on left padding."""
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def turn_ids(mask: Tensor) -> Tensor:
    """[B, A] action mask -> [B, A] int64: how many stretches of True lie before each token's own; -1 where False.

    Something given stands between two turns of the policy, if only the tokens that close a message and open another.
    """
    before = torch.nn.functional.pad(mask, (1, 0))[:, :-1]
    return torch.where(mask, (mask & ~before).long().cumsum(-1) - 1, -1)


def to_tokens(values: Tensor, mask: Tensor) -> Tensor:
    """[B] -> [B, A]: each row's value on every True position of its mask, 0 elsewhere."""
    return torch.where(mask, values.unsqueeze(-1), 0.0)


def aggregate_sum(values: Tensor, mask: Tensor, aggregation: Aggregation, norm_length: int | None = None) -> Tensor:
    """A batch's part of the numerator of an aggregated loss.

    values, mask: [B, A]. Divided by the sum of `aggregate_count` over all batches of an update, the result does
    not depend on how its rows were split into batches. `norm_length` (tokens) is the constant divisor of
    `sequence-mean-token-sum-norm`, which needs it: the padded width would change with the split.
    """
    if aggregation in ("token-mean", "sequence-mean-token-sum"):
        return masked_sum(values, mask)
    if aggregation == "sequence-mean-token-mean":
        return (_sum64(values, mask, -1) / mask.sum(-1).clamp(min=1)).sum().to(values.dtype)
    if aggregation == "sequence-mean-token-sum-norm":
        if norm_length is None or norm_length <= 0:
            raise ValueError(f"aggregation {aggregation!r} needs norm_length > 0, got {norm_length}")
        return (_sum64(values, mask, None) / norm_length).to(values.dtype)
    raise ValueError(f"unknown aggregation {aggregation!r}")


def aggregate_count(mask: Tensor, aggregation: Aggregation) -> float:
    """A batch's part of the divisor: its True tokens, or its rows that have any."""
    return float(mask.sum()) if aggregation == "token-mean" else float(mask.any(-1).sum())
