"""Options of `distill`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from rlhf_core.config import Problem, Section

from .teacher_config import DEMONSTRATION, FEEDBACK, TeacherConfig

if TYPE_CHECKING:
    from rlhf_core.config import ResolvedRun

Divergence = Literal["reverse-kl", "forward-kl", "jsd"]


class DistillConfig(Section):
    """On-policy distillation (GKD, Agarwal 2023, and Lu 2025), alone or in addition to rewards."""

    teacher: TeacherConfig | None = Field(None, description="Model to learn from. Or set teachers.")
    teachers: dict[Annotated[str, Field(pattern=r"^[\w-]+$")], TeacherConfig] = Field(
        default_factory=dict, description="Several models to learn from, by name. Each sample has one of them."
    )
    teacher_key: str | None = Field(
        None, min_length=1, description="Key of the record with the name of its teacher. Required with teachers."
    )
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

    @property
    def by_place(self) -> Mapping[str, TeacherConfig]:
        """Options of each teacher, by their place in this section."""
        one = {} if self.teacher is None else {"teacher": self.teacher}
        return one | {f"teachers.{name}": each for name, each in self.teachers.items()}

    def check(self, run: ResolvedRun) -> Iterator[Problem]:
        """Yield problems of teachers that need rewards, an environment, or the run's own sampling.

        Args:
            run: The resolved run.
        """
        has_environment = run.section("environment") is not None
        for place, teacher in self.by_place.items():
            names = teacher.context_names
            if FEEDBACK in names and not has_environment:
                yield Problem(f"{place}.context", "uses {feedback}, but the run has no environment", "use other names")
            if DEMONSTRATION in names and not has_environment and not run.rewards:
                yield Problem(f"{place}.context", "uses {demonstration}, but the run has no rewards", "add rewards")
            if teacher.tokenizer is not None and has_environment:
                problem = "an environment's episode has several turns, but texts are aligned within one answer"
                yield Problem(f"{place}.tokenizer", problem, "use a teacher with the policy's tokenizer")
            if not (teacher.tokenizer or teacher.server):
                continue
            if run.section("prompts.sampling") is not None:
                problem = "this teacher's log-probs are of one temperature, but prompts.sampling sets others"
                yield Problem(place, problem, "remove the section prompts.sampling")
            if getattr(run.engine.config, "banned_words", []):
                problem = "this teacher returns log-probs of its whole distribution, but engine.banned_words changes "
                yield Problem(place, f"{problem}the policy's", "remove engine.banned_words")

    @model_validator(mode="after")
    def _has_teachers(self) -> DistillConfig:
        if (self.teacher is None) == (not self.teachers):
            raise ValueError("set exactly one of teacher and teachers")
        if (self.teacher_key is None) != (not self.teachers):
            raise ValueError("teachers and teacher_key belong together: teacher_key names the record's key")
        for place, teacher in self.by_place.items() if self.top_k else ():
            if teacher.tokenizer is not None:
                raise ValueError(
                    f"{place} has its own tokenizer, so its most likely tokens are not the policy's: set top_k: 0"
                )
            if teacher.server is not None and teacher.server.protocol == "openai":
                raise ValueError(f"{place}: protocol openai returns no token ids: use protocol vllm, or set top_k: 0")
        return self

    @model_validator(mode="after")
    def _consistent(self) -> DistillConfig:
        if self.divergence != "reverse-kl" and not self.top_k:
            raise ValueError(
                f"divergence {self.divergence} requires the teacher's distribution, not only the sampled token: "
                "set top_k, for example to 16"
            )
        return self
