"""The policy loss `clip`, the default of every algorithm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field, PositiveFloat

import rlhf_objective as objective  # loads torch when the loss is computed, not when its options are read

if TYPE_CHECKING:
    from . import PolicyLoss, PolicyLossInput


def clip(
    batch: PolicyLossInput,
    *,
    clip_eps: Annotated[float, Field(gt=0, lt=1)] = 0.2,
    clip_eps_high: PositiveFloat | None = None,
    dual_clip: Annotated[float, Field(gt=1)] | None = None,
) -> PolicyLoss:
    """PPO's clipped ratio (Schulman 2017). `clip_eps_high` above `clip_eps` is DAPO's clip-higher (Yu 2025)."""
    return objective.ppo_policy_loss(
        batch.log_probs,
        batch.old_log_probs,
        batch.advantages,
        batch.mask,
        clip_eps_low=clip_eps,
        clip_eps_high=clip_eps if clip_eps_high is None else clip_eps_high,
        dual_clip=dual_clip,
    )
