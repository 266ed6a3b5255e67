"""The component that this distribution's entry point names."""

from __future__ import annotations

from rlhf_core.components import Component

from .config import McpConfig

mcp = Component(
    summary="Tools of an MCP server, one process of it for each episode; reward by a tool of it, or by `rewards`.",
    config=McpConfig,
    build="rlhf_mcp.environment:build",
    requires=("mcp",),
    install="pip install 'rlhf-mcp[mcp]'",
)
