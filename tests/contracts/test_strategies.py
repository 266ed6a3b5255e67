"""Every installed strategy keeps the contract, those for several processes in two of them."""

from __future__ import annotations

import pytest

from rlhf_testing.contracts import StrategyContract
from rlhf_testing.strategy_suite import StrategyCase, run_strategies

SHARED_OUT = ("torch-ddp", "ddp", "fsdp", "low-level-zero", "gemini")


@pytest.fixture(scope="module")
def seen_together(tmp_path_factory):
    """What every strategy for several processes did; starting the processes takes longer than the training."""
    cases = [StrategyCase(name, name) for name in SHARED_OUT]
    return run_strategies(cases, 2, tmp_path_factory.mktemp("strategies"))


class TestSingle(StrategyContract):
    plugin = "single"


@pytest.mark.slow
class Together(StrategyContract):
    """Slow, since the plugins' own tests train in several processes too, and look at more."""

    @pytest.fixture(scope="class")
    @classmethod
    def seen(cls, seen_together):
        return seen_together[cls.plugin]


class TestTorchDdp(Together):
    plugin = "torch-ddp"


class TestDdp(Together):
    plugin = "ddp"


class TestFsdp(Together):
    plugin = "fsdp"


class TestLowLevelZero(Together):
    plugin = "low-level-zero"


class TestGemini(Together):
    plugin = "gemini"
    exact = False
