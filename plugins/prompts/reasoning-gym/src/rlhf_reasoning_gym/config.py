"""Options of the prompt source and of the reward."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rlhf_core.config import PromptsConfig, Section


class ReasoningGymPrompts(PromptsConfig):
    """Options of the prompt source `reasoning-gym`."""

    task: str = Field(min_length=1, description="Task of the library, such as chain_sum.")
    size: int = Field(500, ge=1, description="Number of problems.")
    seed: int = Field(0, ge=0, description="Selects the problems, independent of the run's seed.")
    unique: bool = Field(False, description="Deprecated, kept for existing runs: use duplicates: skip.")
    chat: bool | None = Field(
        None, description="Write problems as chat messages. null does so if the model has a chat template."
    )
    task_options: dict[str, Any] = Field(
        default_factory=dict, description="Options of the task, such as {max_terms: 3}."
    )


class ReasoningGymReward(Section):
    """Options of the reward `reasoning-gym`."""

    answer_tag: str | None = Field(
        None,
        pattern=r"^[\w-]+$",
        description="Score the text in the last <TAG>…</TAG> of a completion, or 0 without one. null scores the "
        "whole completion.",
    )
    seconds_per_answer: float = Field(
        5.0, gt=0, description="Deadline of a verifier that evaluates the answer. After it the score is 0."
    )
    sandbox: Literal["namespaces", "landlock"] = Field(
        "namespaces",
        description="Sandbox of a verifier that evaluates the answer as Python. landlock is weaker, for machines that "
        "forbid namespaces.",
    )
