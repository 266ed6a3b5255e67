"""Component named by this distribution's entry point."""

from __future__ import annotations

from rlhf_core.components import Component

from .config import OpenEnvConfig

openenv = Component(
    summary="An environment on an OpenEnv server, one session per episode, with its own reward.",
    config=OpenEnvConfig,
    build="rlhf_openenv.environment:OpenEnvEnvironment",
    requires=("openenv", "fastapi", "fastmcp", "jsonschema", "websockets"),
    install="pip install 'rlhf-openenv[openenv]' && pip install --no-deps 'openenv>=0.10,<0.11'",
)
