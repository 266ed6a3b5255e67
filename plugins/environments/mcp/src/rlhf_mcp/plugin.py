"""Component named by this distribution's entry point."""

from __future__ import annotations

from rlhf_core.components import Component

from .config import McpConfig

mcp = Component(
    summary="Tools of an MCP server, one process per episode. Reward by one of its tools or by `rewards`.",
    config=McpConfig,
    build="rlhf_mcp.environment:build",
    requires=("mcp",),
    install="pip install 'rlhf-mcp[mcp]'",
)
