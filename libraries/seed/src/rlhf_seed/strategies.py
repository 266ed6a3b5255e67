"""Strategies for the models of the seed's classes: an installed strategy, by its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from rlhf_core.components import StrategyContext
from rlhf_core.config.problems import Problems
from rlhf_core.plugins.selected import load
from rlhf_core.strategy import Strategy


def strategy_by_name(name: str, options: Mapping[str, Any] | None = None, *, device: str = "auto") -> Strategy:
    """The installed strategy `name` (`single`, `ddp`, `low-level-zero`, …), for `PPOTrainer` and for `strategy_fn`.

    options: those of a run file's `strategy:` section besides the name. device: `auto`, `cpu`, `cuda` or `cuda:N`.

    It has not joined the other processes yet. Before `prepare`, call `setup()` (`PPOTrainer`); a detached trainer calls
    it on the result of `strategy_fn` itself. `rlhf plugins list` shows the installed strategies.

    Raises `PluginError` on an unknown name, `ConfigError` on a wrong option.
    """
    selected = load("strategies", name)
    problems = Problems()
    config = problems.validate(selected.component.config, dict(options or {}))
    problems.raise_if_any(f"options of the {selected.label}")
    assert config is not None
    return cast(Strategy, selected.build(config, StrategyContext(device=device)))
