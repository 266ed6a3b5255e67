"""One answer to sample, and how answers and new weights join a running generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlhf_core.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Job:
    """One answer to sample."""

    sample_id: int
    branch: int
    prompt_ids: tuple[int, ...]
    max_tokens: int
    seed: int

    @property
    def name(self) -> str:
        """Its name in vLLM."""
        return f"{self.sample_id}-{self.branch}"


Joining = Sequence[tuple[Job, SamplingParams]]
"""The answers that join, each with its sampling parameters."""
Between = Callable[[bool], tuple[Joining, int]]
"""Called between steps with whether answers are open; returns the answers that join and the number of weight loads."""
