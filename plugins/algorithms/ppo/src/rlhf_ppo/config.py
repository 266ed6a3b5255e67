"""Options of `algorithm: {name: ppo}`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rlhf_core import Section
from rlhf_objective import FunctionChoice, FunctionUse, PolicyObjectiveSection

if TYPE_CHECKING:
    from rlhf_core.config import ResolvedRun


class CriticConfig(Section):
    """The critic's start."""

    path: str | None = Field(
        None,
        min_length=1,
        description="Reward model, causal LM or earlier critic to start from: a folder or hub name. null copies the "
        "policy.",
    )


class PPOConfig(PolicyObjectiveSection):
    """Proximal policy optimization (Schulman 2017) with a critic and a KL penalty to the initial policy."""

    adapt_reasons: ClassVar[Mapping[str, str]] = {
        **PolicyObjectiveSection.adapt_reasons,
        "ptx_path": "other processes and a resume need an absolute path",
    }

    dual_clip: float | None = Field(
        None, gt=1, description="Bound on the loss of negative advantages (dual-clip PPO, Ye 2020). null is off."
    )
    value_clip: float | None = Field(
        0.2, gt=0, description="Maximum distance of a value from its value at rollout time. null is off."
    )
    vf_coef: float = Field(1.0, gt=0, description="Coefficient of the value loss.")
    gamma: float = Field(1.0, ge=0, le=1, description="Discount factor per token.")
    lam: float = Field(0.95, ge=0, le=1, description="Lambda of GAE: 1 uses full returns, 0 the one-step TD error.")
    critic_lam: float | None = Field(
        None, ge=0, le=1, description="Lambda of the critic's targets (VC-PPO, Yuan 2025). null uses lam."
    )
    lam_alpha: float | None = Field(
        None,
        gt=0,
        description="Lambda by the answer's length l: 1 - 1 / (lam_alpha * l), at least 0 (VAPO, Yue 2025: 0.05). null "
        "uses lam.",
    )
    critic: CriticConfig = Field(default_factory=CriticConfig, description="The critic's start.")
    critic_warmup_episodes: int = Field(
        0, ge=0, description="Number of first episodes that train only the critic (VC-PPO, Yuan 2025)."
    )
    advantage: FunctionChoice | None = Field(
        None, description="Advantage estimator instead of GAE: a name, or {name: …, option: …}. null is GAE."
    )
    whiten_advantages: bool = Field(True, description="Whiten advantages over the episode's tokens.")
    kl_controller: Literal["fixed", "adaptive"] = Field(
        "fixed", description="Keep kl_coef fixed, or adapt it to reach kl_target (Ziegler 2019)."
    )
    kl_target: float = Field(6.0, gt=0, description="Target KL per answer of the adaptive controller, in nats.")
    kl_horizon_samples: float = Field(10_000, gt=0, description="Time constant of the adaptive controller, in samples.")
    ptx_coef: float = Field(
        0.0, ge=0, lt=1, description="Weight of the pretraining (language modeling) loss in the policy's loss."
    )
    ptx_path: str | None = Field(
        None,
        description="JSON Lines file with `text`, or `prompt` and `completion`, per line. Required if ptx_coef > 0.",
    )
    ptx_max_tokens: int = Field(512, ge=2, description="Maximum tokens per pretraining text. The rest is cut off.")

    @model_validator(mode="after")
    def _consistent(self) -> PPOConfig:
        if self.ptx_coef > 0 and self.ptx_path is None:
            raise ValueError("ptx_coef > 0 requires pretraining text: set ptx_path to a JSON Lines file")
        if self.kl_controller == "adaptive" and self.kl_in == "loss":
            raise ValueError("the adaptive controller requires the KL penalty in the reward: set kl_in to reward")
        if self.lam_alpha is not None and self.lam != PPOConfig.model_fields["lam"].default:
            raise ValueError("lam_alpha replaces lam: remove one of them (critic_lam is that of the critic's targets)")
        return self

    def adapt(self, run: ResolvedRun) -> Self:
        """Make the path of texts absolute, for other processes and for a resume.

        Args:
            run: The resolved run.
        """
        adapted = super().adapt(run)
        if adapted.ptx_path is None:
            return adapted
        return adapted.model_copy(update={"ptx_path": str(Path(adapted.ptx_path).absolute())})

    def functions(self) -> dict[str, FunctionUse]:
        uses = super().functions()
        bounds = self.given("clip_eps", "clip_eps_high", "dual_clip")
        uses["policy_loss"] = replace(uses["policy_loss"], shared=bounds)
        if self.advantage is not None:
            uses["advantage"] = FunctionUse("advantages", self.advantage)
        return uses
