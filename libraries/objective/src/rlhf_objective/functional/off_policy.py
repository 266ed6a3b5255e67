"""Correction for samples from another policy: a quantized or lagging engine, or an older version.

All tensors are [B, A] float32 log-probs in nats and masks, without gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rlhf_core.episode_view import single_rank
from rlhf_forward.masking import Reduce, masked_mean, masked_sum

from .kl import clamp_log_ratio, kl_estimate
from .loss_parts import RatioLevel, effective_sample_size

Range = tuple[float, float]
"""Minimum and maximum ratio that is kept, both inclusive."""
DivergenceLevel = Literal["token", "sequence-mean", "sequence-sum", "sequence-max"]
"""The quantity that is bounded: each token's divergence, or the mean, sum or maximum over a sequence."""


@dataclass(frozen=True, slots=True)
class DivergenceBound:
    """Bound on the divergence, above which tokens or whole sequences are dropped."""

    most: float
    """Maximum divergence in nats."""
    estimator: Literal["k2", "k3"] = "k3"
    """Estimator of KL(engine || trainer) at a token that the engine sampled. Never negative."""
    level: DivergenceLevel = "sequence-mean"
    """The quantity that is bounded."""


@dataclass(frozen=True, slots=True)
class OffPolicyCorrection:
    """Importance weight of each token, and the mask of kept tokens."""

    weights: Tensor
    """[B, A] float32, factors of losses or advantages, 0 if `kept` is False."""
    kept: Tensor
    """[B, A] bool: the mask without dropped tokens."""
    truncated: Tensor
    """[B, A] bool: the weight was reduced to the cap."""
    ratio: Tensor
    """[B, A] float32: trainer / engine probability of each token, 1 outside the mask."""
    effective_sample_size: Tensor
    """Scalar in (0, 1]: (sum w)^2 / (n sum w^2) over the n kept tokens, 0 if all are dropped."""


def off_policy_correction(
    trainer_log_probs: Tensor,
    engine_log_probs: Tensor,
    mask: Tensor,
    *,
    cap: float | None = None,
    level: RatioLevel = "token",
    token_range: Range | None = None,
    sequence_range: Range | None = None,
    outlier_range: Range | None = None,
    divergence: DivergenceBound | None = None,
    all_reduce: Reduce = single_rank,
) -> OffPolicyCorrection:
    """Compute weights min(ratio, cap) with ratio = exp(trainer - engine), and a mask without dropped tokens.

    Without `cap` and `token_range`, kept tokens have weight 1.

    Args:
        trainer_log_probs, engine_log_probs: [B, A] nats.
        mask: [B, A] bool.
        cap: Maximum weight (truncated importance sampling). None is off.
        level: The weight is the ratio of each token (Yao 2025), or the ratio of the whole sequence, the product over
            all its sampled tokens, including dropped ones (Liu 2025, "When speed kills stability").
        token_range: Tokens with a ratio outside are dropped, others are weighted by it (IcePop, Ling team 2025).
        sequence_range: Sequences whose geometric mean ratio is outside are dropped.
        outlier_range: Sequences with any token whose ratio is outside are dropped.
        divergence: Tokens or sequences with a larger divergence are dropped.
        all_reduce: Sums over ranks, for the effective sample size.

    Returns:
        Weights, masks, ratios and effective sample size.

    Example:
        >>> trainer, engine = torch.tensor([[0.5, 0.3]]).log(), torch.tensor([[0.25, 0.3]]).log()  # ratio 2, 1
        >>> result = off_policy_correction(trainer, engine, torch.tensor([[True, True]]), cap=1.5)
        >>> result.weights, result.truncated
        (tensor([[1.5000, 1.0000]]), tensor([[ True, False]]))
    """
    difference = torch.where(mask, (trainer_log_probs - engine_log_probs).detach(), 0.0)
    ratio = clamp_log_ratio(difference).exp()
    kept = mask
    if token_range is not None:
        kept = kept & (ratio >= token_range[0]) & (ratio <= token_range[1])
    if sequence_range is not None:
        mean = clamp_log_ratio(masked_mean(difference, mask, dim=-1)).exp()
        kept = kept & ((mean >= sequence_range[0]) & (mean <= sequence_range[1])).unsqueeze(-1)
    if outlier_range is not None:
        kept = kept & ((ratio >= outlier_range[0]) & (ratio <= outlier_range[1])).all(-1, keepdim=True)
    if divergence is not None:
        kept = kept & _within(divergence, difference, mask)
    weights, truncated = torch.ones_like(ratio), torch.zeros_like(mask)
    if cap is not None or token_range is not None:
        weights = ratio if level == "token" else _sequence_ratio(difference, mask)
    if cap is not None:
        weights, truncated = weights.clamp(max=cap), (weights > cap) & kept
    weights = torch.where(kept, weights, 0.0)
    return OffPolicyCorrection(weights, kept, truncated, ratio, effective_sample_size(weights, kept, all_reduce))


def _within(bound: DivergenceBound, difference: Tensor, mask: Tensor) -> Tensor:
    """[B, A] bool, or [B, 1] for whole sequences: divergence within the bound. `difference` is 0 outside the mask."""
    each = kl_estimate(torch.zeros_like(difference), difference, bound.estimator)
    if bound.level == "sequence-mean":
        each = masked_mean(each, mask, dim=-1).unsqueeze(-1)
    elif bound.level == "sequence-sum":
        each = masked_sum(each, mask, dim=-1).unsqueeze(-1)
    elif bound.level == "sequence-max":
        each = each.amax(-1, keepdim=True)
    return each <= bound.most


def _sequence_ratio(difference: Tensor, mask: Tensor) -> Tensor:
    total = masked_sum(difference, mask, dim=-1).unsqueeze(-1)
    return clamp_log_ratio(total).exp().expand_as(difference)


def overlong_penalty(lengths: Tensor, *, max_tokens: int, buffer_tokens: int) -> Tensor:
    """DAPO's soft penalty of long answers (Yu 2025, equation 13).

    0 up to max_tokens - buffer_tokens, then linear to -1 at max_tokens, and -1 beyond.

    Args:
        lengths: [B] number of tokens.
        max_tokens: Maximum length of an answer.
        buffer_tokens: Length of the linear part.

    Returns:
        [B] float32 in [-1, 0].

    Example:
        >>> overlong_penalty(torch.tensor([10, 15, 20]), max_tokens=20, buffer_tokens=10)
        tensor([ 0.0000, -0.5000, -1.0000])
    """
    free = max_tokens - buffer_tokens
    return ((free - lengths.float()) / buffer_tokens).clamp(-1.0, 0.0)
