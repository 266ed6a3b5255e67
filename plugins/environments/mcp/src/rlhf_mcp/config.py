"""Options of the environment `mcp`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints, model_validator

from rlhf_core.config import Command, Section

ToolName = Annotated[str, StringConstraints(min_length=1)]


class McpConfig(Section):
    """Options of the environment `mcp`."""

    command: Command = Field(
        description="Program and arguments of the server, such as [./server.py] or [npx, -y, some-server]. It uses MCP "
        "over standard input and output. Each episode starts a new one in the working folder."
    )
    env: list[Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]] = Field(
        default_factory=list,
        description="Names of environment variables to pass to the server, in addition to PATH and HOME.",
    )
    tools: list[ToolName] | None = Field(
        None, min_length=1, description="Names of the server's tools to offer to the policy. null offers all."
    )
    setup_tool: ToolName | None = Field(
        None,
        description="Tool to call before the first turn, hidden from the policy. Its arguments are the keys of the "
        "prompt's record, `prompt`, `answer` and `seed` that it accepts. The result is appended to the prompt.",
    )
    reward_tool: ToolName | None = Field(
        None,
        description="Tool to call after the last turn, in the same way. Its result is the episode's reward, a number.",
    )
    max_output_chars: int = Field(10_000, ge=1, description="Maximum length of a tool's result. The rest is cut.")

    @model_validator(mode="after")
    def _check_hidden_tools(self) -> McpConfig:
        if both := {self.setup_tool, self.reward_tool} & set(self.tools or ()):
            raise ValueError(f"tools: {both.pop()!r} is hidden from the policy: remove it here")
        return self
