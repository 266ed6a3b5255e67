"""REINFORCE++: rewards-to-go, whitened over all tokens of the episode, on the clipped loss."""

from __future__ import annotations

from rlhf_core.components import AlgorithmContext
from rlhf_core.function_plugins import bind_function

from .checks import check_groups
from .config import ReinforceConfig
from .critic_free import CriticFree


def build(config: ReinforceConfig, context: AlgorithmContext) -> CriticFree:
    """REINFORCE++ under its options. Raises `ConfigError` where groups of one are to be compared."""
    own = "reward-to-go" if config.baseline == "none" else "group-whitened"
    choice = own if config.advantage is None else config.advantage
    check_groups("reinforce++", choice, context.samples_per_prompt)
    shared = {} if config.gamma is None else {"gamma": config.gamma}
    return CriticFree(config, context, bind_function("advantages", choice, where="algorithm.advantage", shared=shared))
