"""Policy losses that hold back the tokens by which the entropy falls (Cui 2025, "The entropy mechanism", section 4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

import rlhf_objective as objective  # loads torch when a loss is computed, not when its options are read

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf_objective import EpisodeTokens, PolicyLoss, PolicyLossInput

Fraction = Annotated[float, Field(gt=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
_ROUNDING_NATS = 1e-5
"""A log-ratio below it has no sign: before the first update that of each token is the rounding of two forwards."""


def covariances(tokens: EpisodeTokens) -> tuple[Tensor, Tensor]:
    """(A - mean A) (log p - mean log p), means over the episode: [R, A] of the tokens here, and [T] of all."""
    advantages, log_probs = tokens.all_tokens(tokens.advantages), tokens.all_tokens(tokens.log_probs)
    mean_advantage, mean_log_prob = advantages.sum(), log_probs.sum()
    number = max(advantages.numel(), 1)
    mean_advantage, mean_log_prob = mean_advantage / number, mean_log_prob / number
    here = (tokens.advantages.double() - mean_advantage) * (tokens.log_probs.double() - mean_log_prob)
    return here, (advantages - mean_advantage) * (log_probs - mean_log_prob)


def some_between(tokens: EpisodeTokens, *, fraction: float, low: float, high: float) -> Tensor:
    """[R, A] bool: so large a share of all tokens, drawn from those whose covariance lies between the bounds."""
    here, every = covariances(tokens)
    candidates = ((every > low) & (every < high)).sum().clamp(min=1)
    share = max(fraction * every.numel(), 1.0) / candidates.double()
    return (here > low) & (here < high) & (tokens.draws < share) & tokens.mask


def largest(tokens: EpisodeTokens, *, fraction: float) -> Tensor:
    """[R, A] bool: so large a share of all tokens, of the largest covariance, and those equal to the last of them."""
    here, every = covariances(tokens)
    if every.numel() == 0:
        return tokens.mask
    number = max(int(fraction * every.numel()), 1)
    return (here >= every.topk(number).values[-1]) & tokens.mask


@objective.marks(some_between)
def clip_cov(
    batch: PolicyLossInput,
    *,
    clip_eps: Fraction = 0.2,
    clip_eps_high: Positive | None = None,
    fraction: Fraction = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
) -> PolicyLoss:
    """PPO's clip, and no gradient for a few tokens of large covariance between low and high (Clip-Cov, Cui 2025)."""
    from dataclasses import replace

    import torch

    high_eps = clip_eps if clip_eps_high is None else clip_eps_high
    given = (batch.log_probs, batch.old_log_probs, batch.advantages, batch.mask)
    found = objective.ppo_policy_loss(*given, clip_eps_low=clip_eps, clip_eps_high=high_eps)
    if batch.marked is None:
        return found
    held = batch.marked & batch.mask
    return replace(found, losses=torch.where(held, 0.0, found.losses), clipped=found.clipped | held)


@objective.marks(largest)
def kl_cov(batch: PolicyLossInput, *, fraction: Fraction = 2e-3, coef: Positive = 1.0) -> PolicyLoss:
    """The ratio times A, and on the tokens of largest covariance a penalty coef |log ratio| (KL-Cov, Cui 2025)."""
    import torch

    ratio = objective.importance_ratio(batch.log_probs, batch.old_log_probs, batch.mask)
    losses = -ratio * torch.where(batch.mask, batch.advantages, 0.0)
    nowhere = torch.zeros_like(batch.mask)
    if batch.marked is not None:
        moved = torch.where(batch.mask & batch.marked, batch.log_probs - batch.old_log_probs, 0.0)
        moved = torch.where(moved.detach().abs() > _ROUNDING_NATS, moved, 0.0)
        losses = losses + coef * moved.abs()
    return objective.PolicyLoss(torch.where(batch.mask, losses, 0.0), ratio.detach(), nowhere, nowhere)
