"""Options of the environment `mcp`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints, model_validator

from rlhf_core.config import Command, Section

ToolName = Annotated[str, StringConstraints(min_length=1)]


class McpConfig(Section):
    """Options of the environment `mcp`."""

    command: Command = Field(
        description="The server, which speaks MCP over its standard input and output: a program and its arguments, "
        "such as [./server.py] or [npx, -y, some-server]. It is started anew for each episode, in the working folder."
    )
    env: list[Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]] = Field(
        default_factory=list,
        description="Names of environment variables that the server gets; of all others, it gets PATH and HOME only.",
    )
    tools: list[ToolName] | None = Field(
        None, min_length=1, description="Names of the server's tools that the policy gets; null is all of them."
    )
    setup_tool: ToolName | None = Field(
        None,
        description="A tool that is called before the first turn, hidden from the policy, with those keys of the "
        "prompt's record (and `prompt`, `answer`, `seed`) that it takes; what it says stands behind the prompt.",
    )
    reward_tool: ToolName | None = Field(
        None,
        description="A tool that is called after the last turn, likewise, and gives the episode's reward: a number.",
    )
    max_output_chars: int = Field(10_000, ge=1, description="Longest answer of a tool; the rest is cut.")

    @model_validator(mode="after")
    def _hidden_tools_are_hidden(self) -> McpConfig:
        if both := {self.setup_tool, self.reward_tool} & set(self.tools or ()):
            raise ValueError(f"tools: {both.pop()!r} is hidden from the policy: take it out here")
        return self
