"""Policy losses by name (`rlhf.policy_losses`): per token, not yet aggregated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

if TYPE_CHECKING:  # checking a run file reads the options below; only losses need torch
    from rlhf_core.functional import PolicyLoss, PolicyLossInput

Fraction = Annotated[float, Field(gt=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]


def gspo(batch: PolicyLossInput, *, clip_eps: Fraction = 3e-4, clip_eps_high: Positive | None = 4e-4) -> PolicyLoss:
    """The clip on the length-normalised ratio of the whole sequence (GSPO, Zheng 2025; its bounds, section 5.1)."""
    from rlhf_core.functional import ppo_policy_loss

    return ppo_policy_loss(
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
    clip_eps_high: Positive = 4.0,
) -> PolicyLoss:
    """REINFORCE with a clipped weight, so every token keeps its gradient (CISPO: MiniMax-M1 2025).

    By default the ratio is bounded above only, at 5 (ScaleRL, Khatri 2025).
    """
    from rlhf_core.functional import cispo_policy_loss

    return cispo_policy_loss(
        batch.log_probs,
        batch.old_log_probs,
        batch.advantages,
        batch.mask,
        clip_eps_low=clip_eps,
        clip_eps_high=clip_eps_high,
    )
