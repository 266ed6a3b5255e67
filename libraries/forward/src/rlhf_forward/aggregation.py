"""Aggregation of per-token losses to one number per update."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from .masking import masked_sum, sum64

Aggregation = Literal[
    "token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "sequence-mean-token-sum-norm"
]
"""Average of token losses: over all tokens, or over sequences, each with the mean of its tokens, their sum, or their
sum divided by a constant length (Dr. GRPO, Liu 2025)."""


def aggregate_sum(values: Tensor, mask: Tensor, aggregation: Aggregation, norm_length: int | None = None) -> Tensor:
    """Compute a batch's part of the numerator of an aggregated loss.

    The sum over all batches of an update, divided by the sum of their `aggregate_count`, does not depend on how rows
    are split into batches.

    Args:
        values: [B, A] float, a loss per token.
        mask: [B, A] bool, True = counts in the loss.
        aggregation: Average over tokens or sequences.
        norm_length: Constant divisor of `sequence-mean-token-sum-norm`, in tokens. The padded width would depend on the
            split.

    Returns:
        Scalar of the dtype of `values`, with gradient.

    Raises:
        ValueError: The aggregation is unknown, or `norm_length` is missing.

    Example:
        >>> import torch
        >>> values = torch.tensor([[1.0, 2.0, 3.0], [4.0, 0.0, 0.0]])
        >>> mask = torch.tensor([[True, True, True], [True, False, False]])
        >>> aggregate_sum(values, mask, "token-mean") / aggregate_count(mask, "token-mean")  # 10 / 4 tokens
        tensor(2.5000)
        >>> name = "sequence-mean-token-mean"
        >>> aggregate_sum(values, mask, name) / aggregate_count(mask, name)  # (2 + 4) / 2 sequences
        tensor(3.)
    """
    if aggregation in ("token-mean", "sequence-mean-token-sum"):
        return masked_sum(values, mask)
    if aggregation == "sequence-mean-token-mean":
        return (sum64(values, mask, -1) / mask.sum(-1).clamp(min=1)).sum().to(values.dtype)
    if aggregation == "sequence-mean-token-sum-norm":
        if norm_length is None or norm_length <= 0:
            raise ValueError(f"aggregation {aggregation!r} needs norm_length > 0, got {norm_length}")
        return (sum64(values, mask, None) / norm_length).to(values.dtype)
    raise ValueError(f"unknown aggregation {aggregation!r}")


def aggregate_count(mask: Tensor, aggregation: Aggregation) -> float:
    """Count a batch's part of the divisor of an aggregated loss.

    Args:
        mask: [B, A] bool, True = counts in the loss.
        aggregation: Average over tokens or sequences.

    Returns:
        Number of True tokens for `token-mean`, otherwise number of rows with a True token.
    """
    return float(mask.sum()) if aggregation == "token-mean" else float(mask.any(-1).sum())
