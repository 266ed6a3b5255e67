"""Policy losses (`rlhf.policy_losses`), per token, not yet aggregated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, PositiveFloat

import rlhf_forward  # loads torch only when a loss is computed, not when options are read
import rlhf_objective as objective

if TYPE_CHECKING:
    from rlhf_objective import PolicyLoss, PolicyLossInput


def gspo(
    batch: PolicyLossInput,
    *,
    clip_eps: Annotated[float, Field(gt=0, lt=1)] = 3e-4,
    clip_eps_high: PositiveFloat | None = 4e-4,
) -> PolicyLoss:
    """Clip the length-normalized ratio of the whole sequence (GSPO, Zheng 2025, with the bounds of section 5.1)."""
    return objective.ppo_policy_loss(
        batch.log_probs,
        batch.old_log_probs,
        batch.advantages,
        batch.mask,
        clip_eps_low=clip_eps,
        clip_eps_high=clip_eps if clip_eps_high is None else clip_eps_high,
        ratio_level="sequence",
    )


def cispo(
    batch: PolicyLossInput,
    *,
    clip_eps: Annotated[float, Field(gt=0, le=1)] = 1.0,
    clip_eps_high: PositiveFloat = 4.0,
) -> PolicyLoss:
    """REINFORCE with a clipped importance weight, so that every token keeps its gradient (CISPO, MiniMax-M1 2025).

    By default the ratio is only bounded above, at 5 (ScaleRL, Khatri 2025).
    """
    return objective.cispo_policy_loss(
        batch.log_probs,
        batch.old_log_probs,
        batch.advantages,
        batch.mask,
        clip_eps_low=clip_eps,
        clip_eps_high=clip_eps_high,
    )


def sapo(
    batch: PolicyLossInput, *, tau_positive: PositiveFloat = 1.0, tau_negative: PositiveFloat = 1.05
) -> PolicyLoss:
    """Replace the clip with a soft gate on the ratio (SAPO, Gao 2025): -(4 / tau) sigmoid(tau (ratio - 1)) A.

    tau depends on the sign of the advantage. A larger tau closes the gate earlier. At ratio 1 the gradient is the
    policy gradient.
    """
    import torch

    ratio = objective.importance_ratio(batch.log_probs, batch.old_log_probs, batch.mask)
    advantages = torch.where(batch.mask, batch.advantages, 0.0)
    tau = torch.where(advantages > 0, tau_positive, tau_negative)
    losses = -(4.0 / tau) * torch.sigmoid(tau * (ratio - 1.0)) * advantages
    none = torch.zeros_like(batch.mask)
    return objective.PolicyLoss(torch.where(batch.mask, losses, 0.0), ratio.detach(), none, none)


def gmpo(
    batch: PolicyLossInput, *, clip_eps: PositiveFloat = 0.4, clip_eps_high: PositiveFloat | None = None
) -> PolicyLoss:
    """Geometric mean of the tokens' clipped ratios, times A (GMPO, Zhao 2025).

    Log-ratios are clipped to [-clip_eps, clip_eps_high] nats, only on the side to which the advantage pushes. The value
    is that of the whole sequence, and each token has its own gradient, as in `gspo`.
    """
    import torch

    mask = batch.mask
    advantages = torch.where(mask, batch.advantages, 0.0)
    log_ratio = torch.where(mask, batch.log_probs - batch.old_log_probs, 0.0)
    inside = log_ratio.clamp(-clip_eps, clip_eps if clip_eps_high is None else clip_eps_high)
    kept = torch.where(advantages > 0, torch.minimum(log_ratio, inside), torch.maximum(log_ratio, inside))
    mean = rlhf_forward.masked_mean(kept, mask, dim=-1).unsqueeze(-1).detach()
    ratio = objective.clamp_log_ratio(torch.where(mask, mean + kept - kept.detach(), 0.0)).exp()
    clipped = (kept != log_ratio).detach() & mask
    return objective.PolicyLoss(
        torch.where(mask, -ratio * advantages, 0.0), ratio.detach(), clipped, torch.zeros_like(mask)
    )


def dppo(
    batch: PolicyLossInput,
    *,
    divergence: Literal["tv", "kl"] = "tv",
    clip_eps: PositiveFloat = 0.2,
    clip_eps_high: PositiveFloat | None = None,
    max_ratio: Annotated[float, Field(ge=1)] = 20.0,
) -> PolicyLoss:
    """Drop the gradient of tokens whose probability moved too far in the advantage's direction (DPPO, Qi 2026).

    `divergence` compares the event "this token" under the old and the new policy, by total variation or by KL in nats
    (equations 13 and 14). Its bound is clip_eps if A < 0 and clip_eps_high if A > 0. max_ratio truncates the weight
    (section 5.4).
    """
    import torch

    mask = batch.mask
    advantages, new, old = (torch.where(mask, x, 0.0) for x in (batch.advantages, batch.log_probs, batch.old_log_probs))
    now, before = new.detach().double().exp(), old.double().exp()
    change = now - before
    distance = change.abs()
    if divergence == "kl":
        # Bound the probability of another token below, so that its logarithm is finite.
        other, other_before = ((1.0 - each).clamp(min=1e-12) for each in (now, before))
        distance = before * (old - new.detach()).double() + other_before * (other_before.log() - other.log())
    bound = torch.where(advantages > 0, clip_eps if clip_eps_high is None else clip_eps_high, clip_eps)
    clipped = (distance > bound) & (change * advantages > 0) & mask
    ratio = objective.importance_ratio(batch.log_probs, batch.old_log_probs, mask).detach()
    losses = -ratio.clamp(max=max_ratio) * advantages * new
    return objective.PolicyLoss(torch.where(mask & ~clipped, losses, 0.0), ratio, clipped, torch.zeros_like(mask))
