"""Settings that cannot work, explained before a model is loaded."""

from __future__ import annotations

from rlhf_core.components import AlgorithmContext
from rlhf_core.config import FunctionChoice
from rlhf_core.errors import ConfigError
from rlhf_core.util import fold

from .config import CriticFreeConfig

_COMPARE_WITHIN_GROUPS = {fold(name) for name in ("group-normalised", "leave-one-out", "group-whitened")}


def check_groups(algorithm: str, estimator: FunctionChoice, samples_per_prompt: int) -> None:
    """Raise `ConfigError` where answers to one prompt are compared and there is only one."""
    name = estimator if isinstance(estimator, str) else str(estimator.get("name"))
    if samples_per_prompt < 2 and fold(name) in _COMPARE_WITHIN_GROUPS:
        raise ConfigError(
            f"is {samples_per_prompt}, but {algorithm} compares the answers to one prompt with each other "
            f"({name}): a group of one teaches nothing",
            where="train.samples_per_prompt",
            hint="set train.samples_per_prompt to 4 or more (2 at least)",
        )


def check_sampling(config: CriticFreeConfig, context: AlgorithmContext) -> None:
    """Raise `ConfigError` for dynamic sampling that no sample could pass."""
    if config.dynamic_sampling and context.samples_per_prompt < 2:
        raise ConfigError(
            "refuses every group without spread in its scores, and a group of one has none: no batch would ever fill",
            where="algorithm.dynamic_sampling",
            hint="set train.samples_per_prompt to 4 or more, or turn dynamic_sampling off",
        )
