"""`best-of`: imitate the best answer to each prompt (RAFT, Dong 2023)."""

from pydantic import Field

from rlhf_core import Component
from rlhf_core.config import Section


class BestOfConfig(Section):
    """Learn from the best of the answers to each prompt, and from no other."""

    min_score: float | None = Field(None, description="Learn from no answer below this score; null takes any best.")


best_of = Component("Imitates the best answer to each prompt.", BestOfConfig, "rlhf_example_best_of.algorithm:BestOf")
