"""Policy losses that restrain the tokens that lower the entropy (Cui 2025, "The entropy mechanism", section 4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

import rlhf_objective as objective  # loads torch only when a loss is computed, not when options are read

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf_objective import EpisodeTokens, PolicyLoss, PolicyLossInput

Fraction = Annotated[float, Field(gt=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
_ROUNDING_NATS = 1e-5
"""Log-ratios below this count as 0. Before the first update, log-ratios are only the rounding errors of two forwards.
"""


def covariances(tokens: EpisodeTokens) -> tuple[Tensor, Tensor]:
    """(A - mean A) (log p - mean log p) with means over the episode: [R, A] of local tokens, and [T] of all."""
    advantages, log_probs = tokens.all_tokens(tokens.advantages), tokens.all_tokens(tokens.log_probs)
    mean_advantage, mean_log_prob = advantages.sum(), log_probs.sum()
    count = max(advantages.numel(), 1)
    mean_advantage, mean_log_prob = mean_advantage / count, mean_log_prob / count
    local = (tokens.advantages.double() - mean_advantage) * (tokens.log_probs.double() - mean_log_prob)
    return local, (advantages - mean_advantage) * (log_probs - mean_log_prob)


def some_between(tokens: EpisodeTokens, *, fraction: float, low: float, high: float) -> Tensor:
    """Select tokens [R, A] bool: `fraction` of all tokens, drawn from those with a covariance between the bounds."""
    local, all_values = covariances(tokens)
    candidates = ((all_values > low) & (all_values < high)).sum().clamp(min=1)
    share = max(fraction * all_values.numel(), 1.0) / candidates.double()
    return (local > low) & (local < high) & (tokens.draws < share) & tokens.mask


def largest(tokens: EpisodeTokens, *, fraction: float) -> Tensor:
    """Select the `fraction` of all tokens with the largest covariance, including ties with the last: [R, A] bool."""
    local, all_values = covariances(tokens)
    if all_values.numel() == 0:
        return tokens.mask
    count = max(int(fraction * all_values.numel()), 1)
    return (local >= all_values.topk(count).values[-1]) & tokens.mask


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
    """PPO's clipped loss, without gradient for some tokens of covariance in (low, high) (Clip-Cov, Cui 2025)."""
    from dataclasses import replace

    import torch

    high_eps = clip_eps if clip_eps_high is None else clip_eps_high
    inputs = (batch.log_probs, batch.old_log_probs, batch.advantages, batch.mask)
    loss = objective.ppo_policy_loss(*inputs, clip_eps_low=clip_eps, clip_eps_high=high_eps)
    if batch.marked is None:
        return loss
    dropped = batch.marked & batch.mask
    return replace(loss, losses=torch.where(dropped, 0.0, loss.losses), clipped=loss.clipped | dropped)


@objective.marks(largest)
def kl_cov(batch: PolicyLossInput, *, fraction: Fraction = 2e-3, coef: Positive = 1.0) -> PolicyLoss:
    """The ratio times A, plus a penalty coef |log ratio| on the tokens of largest covariance (KL-Cov, Cui 2025)."""
    import torch

    ratio = objective.importance_ratio(batch.log_probs, batch.old_log_probs, batch.mask)
    losses = -ratio * torch.where(batch.mask, batch.advantages, 0.0)
    none = torch.zeros_like(batch.mask)
    if batch.marked is not None:
        change = torch.where(batch.mask & batch.marked, batch.log_probs - batch.old_log_probs, 0.0)
        change = torch.where(change.detach().abs() > _ROUNDING_NATS, change, 0.0)
        losses = losses + coef * change.abs()
    return objective.PolicyLoss(torch.where(batch.mask, losses, 0.0), ratio.detach(), none, none)
