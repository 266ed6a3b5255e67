"""The component that this distribution's entry point names."""

from __future__ import annotations

from rlhf_core.components import Component

from .config import OpenEnvConfig

openenv = Component(
    summary="An environment of an OpenEnv server; a session of it for each episode; its own reward.",
    config=OpenEnvConfig,
    build="rlhf_openenv.environment:OpenEnvEnvironment",
    requires=("openenv", "fastapi", "fastmcp", "websockets"),
    install="pip install 'rlhf-openenv[openenv]' && pip install --no-deps 'openenv-core>=0.3,<0.4'",
)
