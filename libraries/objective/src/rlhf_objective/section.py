"""Options of algorithms with a policy loss, and of those whose policy loss is chosen by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rlhf_core.config.processes import TransportConfig

from .named_functions import FunctionChoice, FunctionSection, FunctionUse

if TYPE_CHECKING:
    from rlhf_core.config.resolved import ResolvedRun

Bound = Annotated[float, Field(gt=0)]

LATE_SAMPLES_CAP = 2.0
"""`importance_cap` of a run whose samples may come from older weights."""


class PolicyObjectiveSection(FunctionSection):
    """A named policy loss, a named KL, entropy, and what is done about long, truncated and off-policy answers.

    `rlhf_objective.PolicyObjective` does what it says; base for algorithms that learn from sampled answers.
    """

    adapt_reasons: ClassVar[Mapping[str, str]] = {
        **FunctionSection.adapt_reasons,
        "importance_cap": "samples may come from older weights",
    }

    aggregation: Literal[
        "token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "sequence-mean-token-sum-norm"
    ] = Field("token-mean", description="How token losses become one number, over the global batch.")
    norm_length: int | None = Field(
        None, ge=1, description="Divisor of sequence-mean-token-sum-norm, in tokens; null takes engine.max_new_tokens."
    )
    entropy_coef: float = Field(0.0, ge=0, description="Factor of the entropy bonus.")
    kl_coef: float = Field(0.05, ge=0, description="Factor of the KL penalty; 0 builds no reference model.")
    kl_estimator: FunctionChoice = Field(
        "k1", description="Estimator of the KL per token: k1, k2, k3, abs, k1+, k3+, or FILE.py:NAME."
    )
    kl_in: Literal["reward", "loss"] = Field("reward", description="Penalise the KL in the reward or in the loss.")
    importance_cap: float | None = Field(
        None,
        gt=0,
        description="Weight tokens by min(trainer / engine probability, this), for an engine or version that lags; "
        "null is off.",
    )
    policy_loss: FunctionChoice = Field(
        "clip",
        description="Policy loss: clip, an installed one or FILE.py:NAME; {name: …, option: …} sets its options.",
    )
    clip_eps: float | None = Field(
        None, gt=0, description="Ratio may fall to 1 - clip_eps (and rise to 1 + it); null is the loss's own default."
    )
    clip_eps_high: float | None = Field(
        None, gt=0, description="Ratio may rise to 1 + clip_eps_high (DAPO: clip-higher); null takes clip_eps."
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
    importance_outlier_range: tuple[Bound, Bound] | None = Field(
        None, description="[low, high]: answers with any token whose ratio lies outside are masked; null is off."
    )
    divergence_bound: float | None = Field(
        None, gt=0, description="Mask what diverges from the engine by more, in nats; null is off."
    )
    divergence_estimator: Literal["k2", "k3"] = Field(
        "k3", description="Estimator of the KL from engine to trainer that divergence_bound bounds."
    )
    divergence_level: Literal["token", "sequence-mean", "sequence-sum", "sequence-max"] = Field(
        "sequence-mean", description="divergence_bound is of each token, or of the mean, sum or largest of an answer."
    )
    entropy_target: float | None = Field(
        None,
        gt=0,
        description="Steer entropy_coef to this entropy, in nats a token (Skywork-OR1: He 2025); null keeps it.",
    )
    entropy_coef_step: float = Field(
        0.005, gt=0, description="An episode below entropy_target adds it to entropy_coef, one above takes it off."
    )
    entropy_coef_max: float = Field(1.0, gt=0, description="Most that entropy_coef is steered to; the least is 0.")

    @model_validator(mode="after")
    def _ranges(self) -> PolicyObjectiveSection:
        for key in ("importance_token_range", "importance_sequence_range", "importance_outlier_range"):
            bounds = getattr(self, key)
            if bounds is not None and bounds[0] >= bounds[1]:
                raise ValueError(f"{key} needs low < high, got {list(bounds)}")
        return self

    def functions(self) -> dict[str, FunctionUse]:
        bounds = self.given("clip_eps", "clip_eps_high")
        return {
            "policy_loss": FunctionUse("policy_losses", self.policy_loss, bounds),
            "kl_estimator": FunctionUse("kl_estimators", self.kl_estimator),
        }

    def given(self, *names: str) -> dict[str, Any]:
        """The named options that are not null."""
        return {name: value for name in names if (value := getattr(self, name)) is not None}

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
