"""Options of `distill`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rlhf_core.config import Section

Divergence = Literal["reverse-kl", "forward-kl", "jsd"]


class TeacherConfig(Section):
    """The frozen teacher model. Its vocabulary must be the policy's."""

    path: str = Field(min_length=1, description="Model folder, hub name, or `builtin:NAME`.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Data type of the weights. auto uses model.dtype."
    )
    offload: bool = Field(
        False, description="Keep the model in host memory between forward passes. No effect if the strategy shards it."
    )


class DistillConfig(Section):
    """On-policy distillation (GKD, Agarwal 2023, and Lu 2025), alone or in addition to rewards."""

    teacher: TeacherConfig = Field(description="Model to learn from.")
    divergence: Divergence = Field(
        "reverse-kl",
        description="Divergence of policy P and teacher T at each token: reverse-kl is KL(P || T), "
        "forward-kl KL(T || P), jsd the generalized Jensen-Shannon divergence. The last two require top_k.",
    )
    jsd_weight: float = Field(0.5, gt=0, lt=1, description="Weight of the teacher in the mixture of jsd.")
    top_k: int = Field(
        0,
        ge=0,
        description="Compare the teacher's K most likely tokens, with all others as one event. 0 compares only the "
        "sampled token, by a policy gradient.",
    )
    distill_coef: float = Field(1.0, gt=0, description="Coefficient of the distillation term.")
    reward_coef: float = Field(
        0.0, ge=0, description="Coefficient of the rewards' policy gradient. At 0, rewards are only logged."
    )
    baseline: Literal["group", "episode"] = Field(
        "group",
        description="Baseline of a sample's reward: mean of the other answers to its prompt, or of the episode.",
    )
    clip_eps: float = Field(
        0.2, gt=0, lt=1, description="Clip range of the policy gradient's ratio around 1. See top_k, reward_coef."
    )
    aggregation: Literal[
        "token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "sequence-mean-token-sum-norm"
    ] = Field("token-mean", description="Aggregation of token losses over the global batch.")
    norm_length: int | None = Field(
        None, ge=1, description="Divisor of sequence-mean-token-sum-norm, in tokens. null is engine.max_new_tokens."
    )

    @model_validator(mode="after")
    def _consistent(self) -> DistillConfig:
        if self.divergence != "reverse-kl" and not self.top_k:
            raise ValueError(
                f"divergence {self.divergence} requires the teacher's distribution, not only the sampled token: "
                "set top_k, for example to 16"
            )
        return self
