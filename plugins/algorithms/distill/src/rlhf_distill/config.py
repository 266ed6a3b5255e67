"""Options of `distill`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rlhf_core.config import Section

Divergence = Literal["reverse-kl", "forward-kl", "jsd"]


class TeacherConfig(Section):
    """The frozen model that teaches; its tokens must be those of the policy."""

    path: str = Field(min_length=1, description="A model folder, a hub name, or `builtin:NAME`.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Type of its weights; auto is that of the policy's (model.dtype)."
    )
    offload: bool = Field(
        False, description="Keep it in host memory while it is not asked; not done where a strategy divides it."
    )


class DistillConfig(Section):
    """On-policy distillation (Agarwal 2023, GKD; Lu 2025), alone or beside rewards."""

    teacher: TeacherConfig = Field(description="The model to learn from.")
    divergence: Divergence = Field(
        "reverse-kl",
        description="Of the policy's distribution P and the teacher's T at each token: reverse-kl is KL(P || T), "
        "forward-kl KL(T || P), jsd the generalised Jensen-Shannon divergence. The last two need top_k.",
    )
    jsd_weight: float = Field(0.5, gt=0, lt=1, description="Share of the teacher in the mixture of jsd.")
    top_k: int = Field(
        0,
        ge=0,
        description="Compare the teacher's K likeliest tokens, and all others as one; 0 compares the sampled token "
        "alone, by a policy gradient.",
    )
    distill_coef: float = Field(1.0, gt=0, description="Factor of what the teacher says.")
    reward_coef: float = Field(
        0.0, ge=0, description="Factor of the rewards' policy gradient; at 0 rewards are only measured."
    )
    baseline: Literal["group", "episode"] = Field(
        "group",
        description="Taken off a sample's reward: the mean of the others to its prompt, or that of the episode.",
    )
    clip_eps: float = Field(
        0.2, gt=0, lt=1, description="The policy gradient's ratio may leave 1 by this much; see top_k, reward_coef."
    )
    aggregation: Literal[
        "token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "sequence-mean-token-sum-norm"
    ] = Field("token-mean", description="How token losses become one number, over the global batch.")
    norm_length: int | None = Field(
        None, ge=1, description="Divisor of sequence-mean-token-sum-norm, in tokens; null takes engine.max_new_tokens."
    )

    @model_validator(mode="after")
    def _consistent(self) -> DistillConfig:
        if self.divergence != "reverse-kl" and not self.top_k:
            raise ValueError(
                f"divergence {self.divergence} needs the teacher's distribution, not only the sampled token: "
                "set top_k (16, say)"
            )
        return self
