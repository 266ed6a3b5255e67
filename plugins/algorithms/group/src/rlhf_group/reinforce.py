"""REINFORCE++: rewards-to-go, whitened over all tokens of the episode, on the clipped loss."""

from __future__ import annotations

from rlhf_core.components import AlgorithmContext
from rlhf_core.objective import check_groups

from .config import ReinforceConfig
from .critic_free import CriticFree


def build(config: ReinforceConfig, context: AlgorithmContext) -> CriticFree:
    """REINFORCE++ under its options. Raises `ConfigError` where groups of one are to be compared."""
    made = CriticFree(config, context)
    check_groups("reinforce++", made.estimator, context.samples_per_prompt)
    return made
