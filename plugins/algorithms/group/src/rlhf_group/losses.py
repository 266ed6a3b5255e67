"""Policy losses by name (`rlhf.policy_losses`): per token, not yet aggregated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, PositiveFloat

import rlhf_forward  # loads torch when a loss is computed, not when its options are read
import rlhf_objective as objective

if TYPE_CHECKING:
    from rlhf_objective import PolicyLoss, PolicyLossInput


def gspo(
    batch: PolicyLossInput,
    *,
    clip_eps: Annotated[float, Field(gt=0, lt=1)] = 3e-4,
    clip_eps_high: PositiveFloat | None = 4e-4,
) -> PolicyLoss:
    """The clip on the length-normalised ratio of the whole sequence (GSPO, Zheng 2025; its bounds, section 5.1)."""
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
    """REINFORCE with a clipped weight, so every token keeps its gradient (CISPO: MiniMax-M1 2025).

    By default the ratio is bounded above only, at 5 (ScaleRL, Khatri 2025).
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
    """The ratio behind a soft gate in place of a clip (SAPO, Gao 2025): -(4 / tau) sigmoid(tau (ratio - 1)) A.

    tau is that of the advantage's sign: larger closes the gate earlier. At ratio 1 the gradient is the policy gradient.
    """
    import torch

    ratio = objective.importance_ratio(batch.log_probs, batch.old_log_probs, batch.mask)
    advantages = torch.where(batch.mask, batch.advantages, 0.0)
    tau = torch.where(advantages > 0, tau_positive, tau_negative)
    losses = -(4.0 / tau) * torch.sigmoid(tau * (ratio - 1.0)) * advantages
    nowhere = torch.zeros_like(batch.mask)
    return objective.PolicyLoss(torch.where(batch.mask, losses, 0.0), ratio.detach(), nowhere, nowhere)


def gmpo(
    batch: PolicyLossInput, *, clip_eps: PositiveFloat = 0.4, clip_eps_high: PositiveFloat | None = None
) -> PolicyLoss:
    """The geometric mean of the tokens' clipped ratios, times A (GMPO, Zhao 2025).

    Log-ratios are clipped, to [-clip_eps, clip_eps_high] nats and on the side where the advantage would push further.
    The value is that of the whole sequence and each token has its own gradient, as in `gspo`.
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
    """No gradient for tokens whose probability moved too far in the advantage's direction (DPPO, Qi 2026).

    divergence: of "this token or another", from the old policy to the new: total variation, or KL in nats (equations
    13 and 14); clip_eps bounds it where A < 0, clip_eps_high where A > 0. max_ratio truncates the weight (section 5.4).
    """
    import torch

    mask = batch.mask
    advantages, new, old = (torch.where(mask, x, 0.0) for x in (batch.advantages, batch.log_probs, batch.old_log_probs))
    now, before = new.detach().double().exp(), old.double().exp()
    moved = now - before
    far = moved.abs()
    if divergence == "kl":
        # The probability of another token is bounded below: float64 has no log of 0.
        other, other_before = ((1.0 - each).clamp(min=1e-12) for each in (now, before))
        far = before * (old - new.detach()).double() + other_before * (other_before.log() - other.log())
    bound = torch.where(advantages > 0, clip_eps if clip_eps_high is None else clip_eps_high, clip_eps)
    clipped = (far > bound) & (moved * advantages > 0) & mask
    ratio = objective.importance_ratio(batch.log_probs, batch.old_log_probs, mask).detach()
    losses = -ratio.clamp(max=max_ratio) * advantages * new
    return objective.PolicyLoss(torch.where(mask & ~clipped, losses, 0.0), ratio, clipped, torch.zeros_like(mask))
