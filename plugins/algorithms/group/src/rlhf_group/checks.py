"""Settings that cannot work, explained before a model is loaded."""

from __future__ import annotations

from rlhf_core.components import AlgorithmContext
from rlhf_core.errors import ConfigError

from .config import CriticFreeConfig


def check_sampling(config: CriticFreeConfig, context: AlgorithmContext) -> None:
    """Raise `ConfigError` for dynamic sampling that no sample could pass."""
    if config.dynamic_sampling and context.samples_per_prompt < 2:
        raise ConfigError(
            "refuses every group without spread in its scores, and a group of one has none: no batch would ever fill",
            where="algorithm.dynamic_sampling",
            hint="set train.samples_per_prompt to 4 or more, or turn dynamic_sampling off",
        )
