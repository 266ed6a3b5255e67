"""GRPO: an answer's advantage is its reward relative to the other answers to its prompt."""

from __future__ import annotations

from rlhf_core.components import AlgorithmContext
from rlhf_core.objective import check_groups

from .config import GRPOConfig
from .critic_free import CriticFree


def build(config: GRPOConfig, context: AlgorithmContext) -> CriticFree:
    """GRPO under its options. Raises `ConfigError` for a group of one."""
    made = CriticFree(config, context)
    check_groups("grpo", made.estimator, context.samples_per_prompt)
    return made
