"""Options of `grpo`, `rloo` and `reinforce++`."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Literal

from pydantic import Field

from rlhf_objective import FunctionChoice as Choice
from rlhf_objective import FunctionUse, PolicyObjectiveSection


class CriticFreeConfig(PolicyObjectiveSection):
    """Options shared by all critic-free algorithms."""

    algorithm: ClassVar[str]
    """Name of the algorithm."""
    dynamic_sampling: bool = Field(
        False, description="Replace prompts whose answers all have the same score with later prompts (DAPO)."
    )
    turn_gamma: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Discount factor per turn of an environment, for advantage estimators that credit turns: "
        "turn-normalised, turn-to-go and gigpo. null is the estimator's default.",
    )

    @property
    @abstractmethod
    def estimator(self) -> FunctionUse:
        """The advantage estimator with its options."""

    def functions(self) -> dict[str, FunctionUse]:
        return {"advantage": self.estimator, **super().functions()}


class GRPOConfig(CriticFreeConfig):
    """Group relative policy optimization (Shao 2024), with the changes of Dr. GRPO, DAPO, GSPO and CISPO as options."""

    algorithm = "grpo"
    advantage: Choice = Field(
        "group-normalised", description="Advantage estimator: a name, or {name: …, option: …}. See `policy_loss`."
    )
    divide_by_std: bool | None = Field(
        None, description="Divide by the group's standard deviation (Dr. GRPO: false). null is the estimator's default."
    )
    leave_one_out: bool | None = Field(
        None, description="Exclude the sample itself from its baseline. null is the estimator's default."
    )
    kl_coef: float = Field(0.04, ge=0, description="Coefficient of the KL penalty. 0 builds no reference model.")
    kl_estimator: Choice = Field(
        "k3", description="KL estimator per token: k1, k2, k3, abs, k1+, k3+, or FILE.py:NAME."
    )
    kl_in: Literal["reward", "loss"] = Field("loss", description="Penalize the KL in the reward or in the loss.")

    @property
    def estimator(self) -> FunctionUse:
        return FunctionUse("advantages", self.advantage, self.given("divide_by_std", "leave_one_out", "turn_gamma"))


class RLOOConfig(CriticFreeConfig):
    """REINFORCE leave-one-out (Ahmadian 2024)."""

    algorithm = "rloo"
    advantage: Choice = Field("leave-one-out", description="Advantage estimator: a name, or {name: …, option: …}.")

    @property
    def estimator(self) -> FunctionUse:
        return FunctionUse("advantages", self.advantage, self.given("turn_gamma"))


class ReinforceConfig(CriticFreeConfig):
    """REINFORCE++ (Hu 2025)."""

    algorithm = "reinforce++"
    baseline: Literal["none", "group"] = Field(
        "none", description="group subtracts the mean reward of the prompt's answers first (REINFORCE++-baseline)."
    )
    advantage: Choice | None = Field(
        None, description="Advantage estimator: a name, or {name: …, option: …}. null follows `baseline`."
    )
    gamma: float | None = Field(
        None, ge=0, le=1, description="Discount factor per token. null is the estimator's default."
    )
    kl_coef: float = Field(0.01, ge=0, description="Coefficient of the KL penalty. 0 builds no reference model.")

    @property
    def estimator(self) -> FunctionUse:
        default = "reward-to-go" if self.baseline == "none" else "group-whitened"
        choice = default if self.advantage is None else self.advantage
        return FunctionUse("advantages", choice, self.given("gamma", "turn_gamma"))
