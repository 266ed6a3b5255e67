"""Create an installed strategy by its name, for the models of ColossalChat's classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from rlhf_core.components import StrategyContext
from rlhf_core.config.problems import Problems
from rlhf_core.plugins.selected import load
from rlhf_core.strategy import Strategy


def strategy_by_name(name: str, options: Mapping[str, Any] | None = None, *, device: str = "auto") -> Strategy:
    """Create an installed strategy for `PPOTrainer` and for `strategy_fn`.

    Call its `setup()` to join the other processes before `prepare`. A detached trainer calls `setup()` itself.

    Args:
        name: Name of a strategy: `single`, `ddp`, `low-level-zero`, … (see `rlhf plugins list`).
        options: Other options of a run file's `strategy:` section.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.

    Returns:
        The strategy, not yet connected to other processes.

    Raises:
        PluginError: The name is unknown.
        ConfigError: An option is wrong.

    Example:
        >>> strategy = strategy_by_name("single", device="cpu")
        >>> strategy.setup()
        >>> strategy.world_size
        1
    """
    selected = load("strategies", name)
    problems = Problems()
    config = problems.validate(selected.component.config, dict(options or {}))
    problems.raise_if_any(f"options of the {selected.label}")
    assert config is not None
    return cast(Strategy, selected.build(config, StrategyContext(device=device)))
