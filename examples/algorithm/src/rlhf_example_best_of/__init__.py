"""`best-of`: imitate the best answer to each prompt (RAFT, Dong 2023)."""

from pydantic import Field

from rlhf_core import Component
from rlhf_core.config import Section


class BestOfConfig(Section):
    """Learn only from the best answer to each prompt."""

    min_score: float | None = Field(None, description="Minimum score of a best answer. null: any score.")


best_of = Component("Imitates the best answer to each prompt.", BestOfConfig, "rlhf_example_best_of.algorithm:BestOf")
