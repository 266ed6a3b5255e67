"""Core's requirements on plugins as tests: one class per kind of plugin, to subclass in three lines.

    from rlhf_testing.contracts import RewardContract

    class TestBrevity(RewardContract):
        plugin = "brevity"
        options = {"target_tokens": 8}

Plugins are loaded as in a run: the entry point's name, the component, its options, `build`. Run with pytest;
`--rlhf-device cuda` puts models on a GPU. Importing this needs pytest and nothing heavier.
"""

from __future__ import annotations

from .advantage import AdvantageContract
from .algorithm import AlgorithmContract
from .base import ComponentContract, contracts_for
from .dataset_algorithm import DatasetAlgorithmContract
from .engine import EngineContract
from .environment import EnvironmentContract
from .hooks import HooksContract
from .logger import LoggerContract
from .policy_loss import PolicyLossContract
from .prompts import PromptsContract
from .reward import RewardContract
from .strategy import StrategyContract
from .transport import TransportContract

__all__ = [
    "AdvantageContract",
    "AlgorithmContract",
    "ComponentContract",
    "DatasetAlgorithmContract",
    "EngineContract",
    "EnvironmentContract",
    "HooksContract",
    "LoggerContract",
    "PolicyLossContract",
    "PromptsContract",
    "RewardContract",
    "StrategyContract",
    "TransportContract",
    "contracts_for",
]
