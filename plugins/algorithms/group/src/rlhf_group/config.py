"""Options of `grpo`, `rloo` and `reinforce++`."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rlhf_core.config import FunctionChoice as Choice
from rlhf_core.config import FunctionUse, NamesFunctions, PolicyLossSection

Bound = Annotated[float, Field(gt=0)]


class CriticFreeConfig(PolicyLossSection, NamesFunctions):
    """Options shared by all critic-free algorithms."""

    policy_loss: Choice = Field(
        "clip", description="Policy loss: clip, gspo, cispo or an installed one; {name: …, option: …} sets its options."
    )
    clip_eps: float | None = Field(
        None, gt=0, description="Ratio may fall to 1 - clip_eps (and rise to 1 + it); null is the loss's own default."
    )
    clip_eps_high: float | None = Field(
        None, gt=0, description="Ratio may rise to 1 + clip_eps_high (DAPO: clip-higher); null takes clip_eps."
    )
    dynamic_sampling: bool = Field(
        False, description="Replace prompts whose answers all have one score by later prompts (DAPO)."
    )
    overlong_buffer_tokens: int | None = Field(
        None, ge=1, description="Penalise answers within so many tokens of engine.max_new_tokens (DAPO); null is off."
    )
    overlong_penalty: float = Field(1.0, gt=0, description="Taken off the score of an answer of full length.")
    mask_truncated: bool = Field(False, description="Learn nothing from answers cut by the token limit (DAPO).")
    importance_level: Literal["token", "sequence"] = Field(
        "token", description="The weight is of each token, or the product over the answer's tokens."
    )
    importance_token_range: tuple[Bound, Bound] | None = Field(
        None,
        description="[low, high]: tokens whose trainer / engine ratio lies outside are masked, the others weigh their "
        "ratio (IcePop); null is off.",
    )
    importance_sequence_range: tuple[Bound, Bound] | None = Field(
        None, description="[low, high]: answers whose geometric mean ratio lies outside are masked; null is off."
    )

    @model_validator(mode="after")
    def _consistent(self) -> CriticFreeConfig:
        for key in ("importance_token_range", "importance_sequence_range"):
            bounds = getattr(self, key)
            if bounds is not None and bounds[0] >= bounds[1]:
                raise ValueError(f"{key} needs low < high, got {list(bounds)}")
        if self.clip_eps is not None and self.clip_eps >= 1 and self.policy_loss == "clip":
            raise ValueError("clip_eps must be below 1: the ratio cannot fall to 0 or less")
        return self

    @property
    @abstractmethod
    def estimator(self) -> FunctionUse:
        """The advantage estimator with its options."""

    def functions(self) -> dict[str, FunctionUse]:
        bounds = self._given("clip_eps", "clip_eps_high")
        return {"advantage": self.estimator, "policy_loss": FunctionUse("policy_losses", self.policy_loss, bounds)}

    def _given(self, *names: str) -> dict[str, Any]:
        """The named options that are not null."""
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def weighing_late_samples(self) -> PolicyLossSection:
        """Unchanged where `importance_token_range` is set: it already weights and bounds these ratios."""
        return self if self.importance_token_range is not None else super().weighing_late_samples()

    @property
    def corrects_off_policy(self) -> bool:
        """Whether the trainer's own log-probs are needed at the start of an episode."""
        options = (self.importance_cap, self.importance_token_range, self.importance_sequence_range)
        return any(option is not None for option in options)


class GRPOConfig(CriticFreeConfig):
    """Group relative policy optimisation (Shao 2024), with what Dr. GRPO, DAPO, GSPO and CISPO change as options."""

    advantage: Choice = Field(
        "group-normalised", description="Advantage estimator, by name, or {name: …, option: …}; see `policy_loss`."
    )
    divide_by_std: bool | None = Field(
        None, description="Divide by the group's deviation; false is Dr. GRPO's; null is the estimator's own default."
    )
    leave_one_out: bool | None = Field(
        None, description="Baseline without the sample itself; null is the estimator's own default."
    )
    kl_coef: float = Field(0.04, ge=0, description="Factor of the KL penalty; 0 builds no reference model.")
    kl_estimator: Literal["k1", "k2", "k3"] = Field("k3", description="Estimator of the KL per token.")
    kl_in: Literal["reward", "loss"] = Field("loss", description="Penalise the KL in the reward or in the loss.")

    @property
    def estimator(self) -> FunctionUse:
        return FunctionUse("advantages", self.advantage, self._given("divide_by_std", "leave_one_out"))


class RLOOConfig(CriticFreeConfig):
    """REINFORCE leave-one-out (Ahmadian 2024)."""

    advantage: Choice = Field("leave-one-out", description="Advantage estimator, by name, or {name: …, option: …}.")

    @property
    def estimator(self) -> FunctionUse:
        return FunctionUse("advantages", self.advantage)


class ReinforceConfig(CriticFreeConfig):
    """REINFORCE++ (Hu 2025)."""

    baseline: Literal["none", "group"] = Field(
        "none", description="group: subtract the mean of the prompt's answers first (REINFORCE++-baseline)."
    )
    advantage: Choice | None = Field(
        None, description="Advantage estimator, by name, or {name: …, option: …}; null is what `baseline` says."
    )
    gamma: float | None = Field(
        None, ge=0, le=1, description="Discount of a later reward, per token; null is the estimator's own default."
    )
    kl_coef: float = Field(0.01, ge=0, description="Factor of the KL penalty; 0 builds no reference model.")

    @property
    def estimator(self) -> FunctionUse:
        own = "reward-to-go" if self.baseline == "none" else "group-whitened"
        choice = own if self.advantage is None else self.advantage
        return FunctionUse("advantages", choice, self._given("gamma"))
