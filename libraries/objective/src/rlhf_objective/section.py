"""Options of algorithms whose policy loss is chosen by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rlhf_core.components import StrategyContext
from rlhf_core.config.load import OWN_REWARD
from rlhf_core.config.problems import Problem
from rlhf_core.config.processes import TransportConfig

from .declarations import credits_turns
from .named_functions import FunctionChoice, FunctionSection, FunctionUse, split_choice

if TYPE_CHECKING:
    from rlhf_core.config.resolved import ResolvedRun
    from rlhf_core.plugins.selected import SelectedPlugin

Bound = Annotated[float, Field(gt=0)]

LATE_SAMPLES_CAP = 2.0
"""Default `importance_cap` of a run whose samples may come from older weights."""


class PolicyObjectiveSection(FunctionSection):
    """Options of a named policy loss, a named KL, entropy, and the treatment of long, truncated and off-policy answers.

    `rlhf_objective.PolicyObjective` implements them. Base for algorithms that learn from sampled answers.
    """

    adapt_reasons: ClassVar[Mapping[str, str]] = {
        **FunctionSection.adapt_reasons,
        "importance_cap": "samples may come from older weights",
    }

    aggregation: Literal[
        "token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "sequence-mean-token-sum-norm"
    ] = Field("token-mean", description="Aggregation of token losses over the global batch.")
    norm_length: int | None = Field(
        None, ge=1, description="Divisor of sequence-mean-token-sum-norm, in tokens. null uses engine.max_new_tokens."
    )
    entropy_coef: float = Field(0.0, ge=0, description="Factor of the entropy bonus.")
    kl_coef: float = Field(0.05, ge=0, description="Factor of the KL penalty. 0 runs without a reference model.")
    kl_estimator: FunctionChoice = Field(
        "k1", description="Estimator of the KL per token: k1, k2, k3, abs, k1+, k3+, or FILE.py:NAME."
    )
    kl_in: Literal["reward", "loss"] = Field("reward", description="Penalize the KL in the reward or in the loss.")
    kl_ratio: bool = Field(
        False,
        description="Multiply each token's KL in the loss by the policy's ratio, so that k1 and k3 have the gradient "
        "of the KL (DeepSeek-V3.2).",
    )
    reference_every: int | None = Field(
        None,
        ge=1,
        description="Refresh the reference with the policy's weights every N episodes. null keeps the start.",
    )
    reference_mix: float = Field(
        1.0, gt=0, le=1, description="Weight of the policy in a refreshed reference: 1 copies it, below is an average."
    )
    importance_cap: float | None = Field(
        None,
        gt=0,
        description="Weight tokens by min(trainer / engine probability, importance_cap), for an engine or version that "
        "lags. null is off.",
    )
    policy_loss: FunctionChoice = Field(
        "clip",
        description="Policy loss: clip, an installed one or FILE.py:NAME. {name: …, option: …} sets its options.",
    )
    clip_eps: float | None = Field(
        None, gt=0, description="Bounds of the ratio: 1 - clip_eps, and 1 + clip_eps. null uses the loss's default."
    )
    clip_eps_high: float | None = Field(
        None, gt=0, description="Upper bound 1 + clip_eps_high of the ratio (DAPO: clip-higher). null uses clip_eps."
    )
    overlong_buffer_tokens: int | None = Field(
        None, ge=1, description="Penalize answers within this many tokens of engine.max_new_tokens (DAPO). null is off."
    )
    overlong_penalty: float = Field(1.0, gt=0, description="Penalty subtracted from the score of a full-length answer.")
    mask_truncated: bool = Field(False, description="Mask answers that were cut by the token limit (DAPO).")
    importance_level: Literal["token", "sequence"] = Field(
        "token", description="Weight by the ratio of each token, or by the product over the answer's tokens."
    )
    importance_token_range: tuple[Bound, Bound] | None = Field(
        None,
        description="[low, high]: mask tokens whose trainer / engine ratio is outside, and weight the others by their "
        "ratio (IcePop). null is off.",
    )
    importance_sequence_range: tuple[Bound, Bound] | None = Field(
        None, description="[low, high]: mask answers whose geometric mean ratio is outside. null is off."
    )
    importance_outlier_range: tuple[Bound, Bound] | None = Field(
        None, description="[low, high]: mask answers with any token whose ratio is outside. null is off."
    )
    divergence_bound: float | None = Field(
        None, gt=0, description="Mask tokens or answers that diverge from the engine by more nats. null is off."
    )
    divergence_estimator: Literal["k2", "k3"] = Field(
        "k3", description="Estimator of the KL from engine to trainer that divergence_bound bounds."
    )
    divergence_level: Literal["token", "sequence-mean", "sequence-sum", "sequence-max"] = Field(
        "sequence-mean", description="Bound the divergence of each token, or the mean, sum or maximum of an answer."
    )
    entropy_target: float | None = Field(
        None,
        gt=0,
        description="Adapt entropy_coef to this entropy in nats per token (Skywork-OR1: He 2025). null keeps it.",
    )
    entropy_coef_step: float = Field(
        0.005, gt=0, description="Increase of entropy_coef per episode below entropy_target, and decrease above it."
    )
    entropy_coef_max: float = Field(1.0, gt=0, description="Maximum of an adaptive entropy_coef. The minimum is 0.")

    @model_validator(mode="after")
    def _ranges(self) -> PolicyObjectiveSection:
        for key in ("importance_token_range", "importance_sequence_range", "importance_outlier_range"):
            bounds = getattr(self, key)
            if bounds is not None and bounds[0] >= bounds[1]:
                raise ValueError(f"{key} needs low < high, got {list(bounds)}")
        return self

    @model_validator(mode="after")
    def _weighted_kl(self) -> PolicyObjectiveSection:
        if self.kl_ratio and self.kl_coef == 0:
            raise ValueError("kl_ratio weights the KL, which kl_coef: 0 turns off: remove it")
        if self.kl_ratio and self.kl_in == "reward":
            raise ValueError("kl_ratio weights the KL in the loss: set kl_in to loss")
        if self.kl_ratio and split_choice(self.kl_estimator, "kl_estimator")[0] not in ("k1", "k3"):
            raise ValueError("kl_ratio gives k1 and k3 the gradient of the KL: set kl_estimator to one of them")
        return self

    def functions(self) -> dict[str, FunctionUse]:
        bounds = self.given("clip_eps", "clip_eps_high")
        return {
            "policy_loss": FunctionUse("policy_losses", self.policy_loss, bounds),
            "kl_estimator": FunctionUse("kl_estimators", self.kl_estimator),
        }

    def given(self, *names: str) -> dict[str, Any]:
        """Return the named options that are not null."""
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def check_functions(self, run: ResolvedRun, found: Mapping[str, SelectedPlugin]) -> Iterator[Problem]:
        """Yield a problem if a reference cannot be refreshed, or an estimator does not fit the rewards.

        Args:
            run: The resolved run.
            found: Option -> the function that it chooses.
        """
        yield from self._refresh_problems(run)
        estimator = found.get("advantage")
        if estimator is not None and getattr(estimator.function, "rewards_from_zero", False):
            penalty = "kl_in: reward" if self.kl_in == "reward" and self.kl_coef > 0 else None
            if penalty := penalty or ("overlong_buffer_tokens" if self.overlong_buffer_tokens is not None else None):
                message = f"{estimator.name} needs rewards of at least 0, but {penalty} subtracts from them"
                yield Problem("advantage", message, "set kl_in to loss (or kl_coef to 0), without a length penalty")
        if estimator is None or not credits_turns(estimator.function) or OWN_REWARD not in run.reward_weights:
            return
        scaling = run.run.reward_scaling
        # For an algorithm that always credits turns, the section `reward_scaling` reports the problem.
        if (scaling.clip is not None or scaling.normalise) and not run.algorithm.component.credits_turns:
            message = f"{estimator.name} credits each turn, but reward_scaling.clip and normalise act on their sum"
            yield Problem("advantage", message, "remove them, or use an estimator of the whole answer")

    def _refresh_problems(self, run: ResolvedRun) -> Iterator[Problem]:
        """Yield the reasons why this run cannot refresh its reference."""
        if self.reference_every is None:
            if self.reference_mix != 1.0:
                yield Problem("reference_mix", "mixes a refreshed reference", "set reference_every, too")
            return
        name, strategy = "reference_every", run.strategy
        if run.run.model.lora is not None:
            problem = "the reference of model.lora is the policy without its adapter, which has no weights to refresh"
            yield Problem(name, problem, "remove it, or train without model.lora")
        if run.transport.name != "local":
            problem = f"over {run.transport.name} each maker has its own reference, which is not refreshed"
            yield Problem(name, problem, "remove it, or use transport local")
        if strategy.build(strategy.config, StrategyContext("cpu")).shards_parameters:
            problem = f"strategy {strategy.name} shards its models, and a sharded reference is not refreshed"
            yield Problem(name, problem, "remove it, or use a strategy that does not shard, such as torch-ddp")

    def adapt(self, run: ResolvedRun) -> Self:
        """Set `importance_cap` for samples from older weights, unless the run file sets it or a range bounds them."""
        adapted = super().adapt(run)
        is_set = "importance_cap" in self.model_fields_set or self.importance_token_range is not None
        if is_set or not run.transport.typed(TransportConfig).staleness_bound():
            return adapted
        return adapted.model_copy(update={"importance_cap": LATE_SAMPLES_CAP})

    @property
    def corrects_off_policy(self) -> bool:
        """Whether the trainer's own log-probs are needed at the start of an episode."""
        ranges = ("importance_token_range", "importance_sequence_range", "importance_outlier_range")
        return bool(self.given("importance_cap", "divergence_bound", *ranges))
