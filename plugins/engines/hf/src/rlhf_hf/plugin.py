"""The entry point `hf` of `rlhf.engines`."""

from __future__ import annotations

from rlhf_core.components import Component

from .config import HfEngineConfig

hf = Component(
    summary="Rollouts with transformers and continuous batching, for any causal language model.",
    config=HfEngineConfig,
    build="rlhf_hf.engine:build",
    in_flight=True,
    model_inputs=True,
)
