"""The entry point `http` of `rlhf.engines`. Imports only pydantic, core and light parts of libraries."""

from __future__ import annotations

from rlhf_core.components import Component

from .config import HttpEngineConfig

http = Component(
    summary="Rollouts by a vLLM or SGLang server, which gets the weights as files.",
    config=HttpEngineConfig,
    build="rlhf_engine_http.engine:build",
    in_flight=True,
)
