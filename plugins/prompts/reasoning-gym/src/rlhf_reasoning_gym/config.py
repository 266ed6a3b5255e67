"""Options of the prompt source and of the reward."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rlhf_core.config import PromptsConfig, Section


class ReasoningGymPrompts(PromptsConfig):
    """Options of the prompt source `reasoning-gym`."""

    task: str = Field(min_length=1, description="A task of the library, such as chain_sum.")
    size: int = Field(500, ge=1, description="How many problems.")
    seed: int = Field(0, ge=0, description="Which problems; independent of the run's seed, as a file would be.")
    unique: bool = Field(False, description="As duplicates: skip, which new run files say; runs that began so go on.")
    chat: bool | None = Field(
        None, description="Problems as chat messages; null makes them where the model has a chat template."
    )
    task_options: dict[str, Any] = Field(
        default_factory=dict, description="Options of the task itself, such as {max_terms: 3}."
    )


class ReasoningGymReward(Section):
    """Options of the reward `reasoning-gym`."""

    answer_tag: str | None = Field(
        None,
        pattern=r"^[\w-]+$",
        description="Score what stands in the last <TAG>…</TAG> of a completion, and nothing without one; null scores "
        "the completion as a whole.",
    )
    seconds_per_answer: float = Field(
        5.0, gt=0, description="Deadline for a verifier that evaluates the answer; such an answer then scores 0."
    )
    sandbox: Literal["namespaces", "landlock"] = Field(
        "namespaces",
        description="How a verifier that evaluates the answer as Python is shut in; landlock is the weaker mode, where "
        "namespaces are forbidden.",
    )
