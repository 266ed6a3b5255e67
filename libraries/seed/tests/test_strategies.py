"""Strategies by name."""

from __future__ import annotations

import pytest

from rlhf_core.errors import ConfigError, PluginError
from rlhf_core.strategy import Strategy
from rlhf_seed.strategies import strategy_by_name


def test_an_installed_strategy_with_its_options() -> None:
    strategy = strategy_by_name("Single", {"precision": "bf16"}, device="cpu")
    assert isinstance(strategy, Strategy)
    assert str(strategy.device) == "cpu"
    assert str(strategy.compute_dtype) == "torch.bfloat16"
    assert strategy_by_name("single", device="cpu").compute_dtype is None


def test_wrong_names_and_options_are_named() -> None:
    with pytest.raises(PluginError, match="did you mean"):
        strategy_by_name("singel")
    with pytest.raises(ConfigError, match="precison"):
        strategy_by_name("single", {"precison": "bf16"})
    with pytest.raises(ConfigError, match="precision"):
        strategy_by_name("single", {"precision": "fp8"})
