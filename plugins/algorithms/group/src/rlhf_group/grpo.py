"""GRPO: what an answer is worth is measured against the other answers to its prompt."""

from __future__ import annotations

from rlhf_core.components import AlgorithmContext
from rlhf_core.function_plugins import bind_function

from .checks import check_groups
from .config import GRPOConfig
from .critic_free import CriticFree


def build(config: GRPOConfig, context: AlgorithmContext) -> CriticFree:
    """GRPO under its options. Raises `ConfigError` for a group of one."""
    check_groups("grpo", config.advantage, context.samples_per_prompt)
    given = {"divide_by_std": config.divide_by_std, "leave_one_out": config.leave_one_out}
    shared = {key: value for key, value in given.items() if value is not None}
    estimator = bind_function("advantages", config.advantage, where="algorithm.advantage", shared=shared)
    return CriticFree(config, context, estimator)
