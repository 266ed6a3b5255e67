"""Options of the critic-free algorithms."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rlhf_core.config import Problem
from rlhf_objective import FunctionChoice as Choice
from rlhf_objective import FunctionUse, ImitationConfig, PolicyObjectiveSection, PreferenceConfig, RecordsConfig

if TYPE_CHECKING:
    from rlhf_core.config import ResolvedRun


class CriticFreeConfig(PolicyObjectiveSection):
    """Options shared by all critic-free algorithms."""

    algorithm: ClassVar[str]
    """Name of the algorithm."""
    adapt_reasons: ClassVar[Mapping[str, str]] = {
        **PolicyObjectiveSection.adapt_reasons,
        "records": "other processes and a resume need an absolute path",
    }

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

    policy_coef: float = Field(
        1.0, ge=0, description="Coefficient of the policy loss. 0 learns only from the other sources of loss."
    )
    imitation: ImitationConfig | None = Field(
        None, description="Also imitate selected answers, by cross-entropy. null is off."
    )
    preference: PreferenceConfig | None = Field(
        None, description="Also prefer the best to the worst answer to each prompt (online DPO). null is off."
    )
    records: RecordsConfig | None = Field(None, description="Also learn texts of a file. null is off.")

    @model_validator(mode="after")
    def _sources(self) -> CriticFreeConfig:
        if self.policy_coef == 0 and self.imitation is None and self.preference is None:
            raise ValueError("policy_coef: 0 leaves nothing to learn from answers: set imitation or preference")
        if self.policy_coef == 0 and self.kl_in == "reward" and self.kl_coef > 0:
            raise ValueError(
                "with policy_coef: 0 nothing learns from the KL in the reward: set kl_in: loss or kl_coef: 0"
            )
        if self.policy_coef == 0 and self.importance_cap is not None:
            raise ValueError("importance_cap weights the policy loss, which policy_coef: 0 turns off: remove it")
        masks = ("importance_token_range", "importance_sequence_range", "importance_outlier_range", "divergence_bound")
        dropping = ["mask_truncated"] * self.mask_truncated + list(self.given(*masks))
        if self.preference is not None and dropping:
            raise ValueError(f"preference compares whole answers, of which {dropping[0]} masks parts: remove one")
        return self

    def check_functions(self, run: ResolvedRun, found: Mapping[str, Any]) -> Iterator[Problem]:
        """Also yield a problem if the answers to a prompt, which are compared, do not fit into an update.

        Args:
            run: The resolved run.
            found: Option -> the function that it chooses.
        """
        yield from super().check_functions(run, found)
        train = run.run.train
        if self.preference is not None and train.samples_per_prompt > train.train_batch_size:
            problem = f"compares the {train.samples_per_prompt} answers to a prompt, of which an update has only "
            hint = "set train.train_batch_size to train.samples_per_prompt or more"
            yield Problem("preference", f"{problem}{train.train_batch_size} (train.train_batch_size)", hint)

    def adapt(self, run: ResolvedRun) -> Self:
        """Make paths absolute, for other processes and for a resume. Weights of a policy loss that is off are not set.

        Args:
            run: The resolved run.
        """
        adapted = super().adapt(run)
        if self.policy_coef == 0:
            adapted = adapted.model_copy(update={"importance_cap": None})
        if adapted.records is None:
            return adapted
        path = str(Path(adapted.records.path).absolute())
        return adapted.model_copy(update={"records": adapted.records.model_copy(update={"path": path})})

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


class GroupSourceConfig(CriticFreeConfig):
    """Options of algorithms that learn from selected answers instead of a policy gradient."""

    policy_coef: float = Field(0.0, ge=0, description="Coefficient of an additional policy loss. 0 is off.")
    advantage: Choice = Field(
        "group-normalised", description="Advantage estimator of the additional policy loss: a name, or {name: …}."
    )
    kl_coef: float = Field(0.0, ge=0, description="Coefficient of an additional KL penalty. 0 is off.")
    kl_estimator: Choice = Field(
        "k3", description="KL estimator per token: k1, k2, k3, abs, k1+, k3+, or FILE.py:NAME."
    )
    kl_in: Literal["reward", "loss"] = Field("loss", description="Penalize the KL in the reward or in the loss.")

    @property
    def estimator(self) -> FunctionUse:
        return FunctionUse("advantages", self.advantage, self.given("turn_gamma"))


class RejectionSamplingConfig(GroupSourceConfig):
    """Rejection sampling (RAFT, Dong 2023) and expert iteration (Anthony 2017)."""

    algorithm = "rejection-sampling"
    imitation: ImitationConfig = Field(default_factory=ImitationConfig, description="The answers to imitate.")


class OnlineDPOConfig(GroupSourceConfig):
    """Online DPO (Guo 2024) on the policy's own answers, which the rewards compare."""

    algorithm = "online-dpo"
    preference: PreferenceConfig = Field(
        default_factory=PreferenceConfig, description="The preference loss of the best and the worst answer."
    )
