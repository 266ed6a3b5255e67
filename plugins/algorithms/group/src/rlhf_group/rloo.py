"""RLOO: REINFORCE with the mean reward of the other answers to the prompt as baseline."""

from __future__ import annotations

from rlhf_core.components import AlgorithmContext
from rlhf_core.objective import check_groups

from .config import RLOOConfig
from .critic_free import CriticFree


def build(config: RLOOConfig, context: AlgorithmContext) -> CriticFree:
    """RLOO under its options. Raises `ConfigError` for a group of one."""
    made = CriticFree(config, context)
    check_groups("rloo", made.estimator, context.samples_per_prompt)
    return made
