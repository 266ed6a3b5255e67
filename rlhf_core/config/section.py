"""The base of every section of a run file, core's and plugins'."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """Base of every section: unknown keys, NaN and infinity are errors; nothing changes after it was checked."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class PolicyLossSection(Section):
    """Base of the options of an algorithm that learns from sampled answers: what every policy loss is made with."""

    aggregation: Literal[
        "token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "sequence-mean-token-sum-norm"
    ] = Field("token-mean", description="How token losses become one number, over the global batch.")
    norm_length: int | None = Field(
        None, ge=1, description="Divisor of sequence-mean-token-sum-norm, in tokens; null takes engine.max_new_tokens."
    )
    entropy_coef: float = Field(0.0, ge=0, description="Factor of the entropy bonus.")
    kl_coef: float = Field(0.05, ge=0, description="Factor of the KL penalty; 0 builds no reference model.")
    kl_estimator: Literal["k1", "k2", "k3"] = Field("k1", description="Estimator of the KL per token.")
    kl_in: Literal["reward", "loss"] = Field("reward", description="Penalise the KL in the reward or in the loss.")
    importance_cap: float | None = Field(
        None,
        gt=0,
        description="Weight tokens by min(trainer / engine probability, this), for an engine or version that lags; "
        "null is off.",
    )
