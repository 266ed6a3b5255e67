"""The core of the rlhf framework: types, protocols, hooks, configuration and one training loop.

Importing it is cheap: no torch, ray or transformers until a run starts.
"""

from __future__ import annotations

from .components import API_VERSION, Component
from .entry.train import TrainResult, train
from .errors import RlhfError
from .hookspecs import hookimpl
from .types import Completion, Experience, GenerationRequest, Prompt, Rollout, RolloutGroup, SamplingParams

__all__ = [
    "API_VERSION",
    "Completion",
    "Component",
    "Experience",
    "GenerationRequest",
    "Prompt",
    "RlhfError",
    "Rollout",
    "RolloutGroup",
    "SamplingParams",
    "TrainResult",
    "hookimpl",
    "train",
]
