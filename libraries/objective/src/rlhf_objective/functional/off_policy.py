"""Corrects for samples from another policy: a quantised or lagging engine, or an older version.

All tensors are [B, A] float32 log-probs in nats and masks; nothing here carries a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rlhf_core.episode_view import single_rank
from rlhf_forward.masking import Reduce, masked_mean, masked_sum

from .kl import clamp_log_ratio, kl_estimate
from .losses import RatioLevel, effective_sample_size

Range = tuple[float, float]
"""Lowest and highest ratio that is kept, both included."""
DivergenceLevel = Literal["token", "sequence-mean", "sequence-sum", "sequence-max"]
"""The quantity that is bounded: each token's divergence, or the mean, sum or maximum over a sequence."""


@dataclass(frozen=True, slots=True)
class DivergenceBound:
    """Drops tokens, or whole sequences, whose divergence is larger."""

    most: float
    """Nats."""
    estimator: Literal["k2", "k3"] = "k3"
    """Estimator of KL(engine || trainer) at a token the engine sampled; never negative."""
    level: DivergenceLevel = "sequence-mean"


@dataclass(frozen=True, slots=True)
class OffPolicyCorrection:
    """Importance weight of each token, and the mask of kept tokens."""

    weights: Tensor
    """[B, A] float32 to multiply into losses or advantages: 0 where `kept` is False."""
    kept: Tensor
    """[B, A] bool: the mask without tokens outside the allowed range."""
    truncated: Tensor
    """[B, A] bool: the weight was cut to the cap."""
    ratio: Tensor
    """[B, A] float32: trainer / engine of each token, 1 outside the mask."""
    effective_sample_size: Tensor
    """Scalar in (0, 1]: (sum w)^2 / (n sum w^2) over the n kept tokens; 0 where there are none."""


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
    """Weights min(ratio, cap) with ratio = exp(trainer - engine), and masks of tokens inside a range.

    cap: truncated importance sampling. level: the ratio of each token (Yao 2025), or of the whole sequence, the
    product over its tokens, on each of them (Liu 2025, "When speed kills stability"): over all sampled tokens, also
    those a range drops, since it is the ratio of the answer's two probabilities.
    token_range: a token whose ratio lies outside is dropped, one inside is weighted by its ratio (IcePop, Ling team
    2025), truncated at `cap` where there is one.
    sequence_range: a sequence is dropped when the geometric mean of its ratios lies outside; outlier_range: when the
    ratio of any of its tokens does. divergence: tokens or sequences that diverge further are dropped. Without `cap` and
    `token_range`, kept tokens have weight 1. The effective sample size is over all ranks with `all_reduce`.
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
    """[B, A], or [B, 1] for whole sequences, bool: what does not diverge by more. `difference`: 0 outside the mask."""
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
    """DAPO's soft penalty of long answers (Yu 2025, equation 13): [B] token counts -> [B] float32 in [-1, 0].

    0 up to max_tokens - buffer_tokens, then then linear to -1 at max_tokens, -1 beyond.
    """
    free = max_tokens - buffer_tokens
    return ((free - lengths.float()) / buffer_tokens).clamp(-1.0, 0.0)
