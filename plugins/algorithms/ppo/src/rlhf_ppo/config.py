"""Options of `algorithm: {name: ppo}`."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import Field, model_validator

from rlhf_objective import FunctionChoice, FunctionUse, PolicyObjectiveSection


class PPOConfig(PolicyObjectiveSection):
    """Proximal policy optimisation (Schulman 2017) with a critic and a KL penalty to the start policy."""

    dual_clip: float | None = Field(
        None, gt=1, description="Bound of the loss where the advantage is negative (Ye 2020); null is off."
    )
    value_clip: float | None = Field(
        0.2, gt=0, description="Values may move this far from those of the rollout; null is off."
    )
    vf_coef: float = Field(1.0, gt=0, description="Factor of the value loss.")
    gamma: float = Field(1.0, ge=0, le=1, description="Discount of a later reward, per token.")
    lam: float = Field(0.95, ge=0, le=1, description="GAE's lambda: 1 is the plain return, 0 one step ahead.")
    critic_lam: float | None = Field(
        None, ge=0, le=1, description="Lambda of the critic's targets (VC-PPO, Yuan 2025); null takes lam."
    )
    advantage: FunctionChoice | None = Field(
        None, description="Advantage estimator in place of GAE, by name, or {name: …, option: …}; null is GAE."
    )
    whiten_advantages: bool = Field(True, description="Whiten advantages over the episode's tokens.")
    kl_controller: Literal["fixed", "adaptive"] = Field(
        "fixed", description="Keep kl_coef, or steer the KL to kl_target (Ziegler 2019)."
    )
    kl_target: float = Field(6.0, gt=0, description="KL per answer the adaptive controller aims at, in nats.")
    kl_horizon_samples: float = Field(10_000, gt=0, description="How slowly the adaptive controller moves, in samples.")
    ptx_coef: float = Field(
        0.0, ge=0, lt=1, description="Share of the language-modelling loss on pretraining text in the policy's loss."
    )
    ptx_path: str | None = Field(
        None, description="JSON Lines file of pretraining text, one `text` a line; needed when ptx_coef > 0."
    )
    ptx_max_tokens: int = Field(512, ge=2, description="Longest pretraining text used, in tokens.")

    @model_validator(mode="after")
    def _consistent(self) -> PPOConfig:
        if self.ptx_coef > 0 and self.ptx_path is None:
            raise ValueError("ptx_coef > 0 needs pretraining text: set ptx_path to a JSON Lines file")
        if self.kl_controller == "adaptive" and self.kl_in == "loss":
            raise ValueError("the adaptive controller steers the KL in the reward: set kl_in to reward")
        return self

    def functions(self) -> dict[str, FunctionUse]:
        found = super().functions()
        bounds = self.given("clip_eps", "clip_eps_high", "dual_clip")
        found["policy_loss"] = replace(found["policy_loss"], shared=bounds)
        if self.advantage is not None:
            found["advantage"] = FunctionUse("advantages", self.advantage)
        return found
