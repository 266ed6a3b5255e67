"""The task of an episode, from the run's seed, the prompt and the sample id."""

from __future__ import annotations

from ..types import Prompt
from ..util.rng import derive_seed
from .contract import Task


def make_task(seed: int, purpose: str, prompt: Prompt, sample_id: int) -> Task:
    """purpose: keeps the seeds of training and of evaluation apart."""
    return Task(
        prompt=prompt,
        sample_id=sample_id,
        seed=derive_seed(seed, purpose, prompt.position),
        sample_seed=derive_seed(seed, purpose, "sample", sample_id),
    )
