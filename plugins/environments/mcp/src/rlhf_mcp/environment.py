"""`mcp`: one episode with the tools of an MCP server in a child process."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mcp.types import Tool as ServerTool

from rlhf_core.components import TaskContext
from rlhf_core.errors import ConfigError, EpisodeError
from rlhf_core.types import ToolCall
from rlhf_core.util import printable
from rlhf_episodes import Outcome, Policy, Task, converse

from .config import McpConfig
from .process import ServerProcess
from .server import McpConnection, ToolRefused
from .tools import fits_schema, result_content, result_text, schemas

logger = logging.getLogger(__name__)

_ALWAYS = ("PATH", "HOME")
"""Environment variables that every server gets."""


class McpEnvironment:
    """Starts a server for the episode and ends it with the episode, so that episodes do not share its state."""

    def __init__(self, config: McpConfig, process: ServerProcess) -> None:
        self._config = config
        self._process = process
        self._num_errors = 0
        self._num_invalid = 0
        """Number of calls whose arguments do not match the tool's schema."""

    async def run(self, task: Task, policy: Policy) -> Outcome:
        """Play turns and execute their calls until a turn without calls or a limit."""
        server = McpConnection(self._process)
        try:
            return await server.serve(partial(self._play, server, task, policy))
        except asyncio.CancelledError:
            if server.current_call:
                logger.warning("sample %d: the MCP server was ended while %s", task.sample_id, server.current_call)
            raise

    async def _play(self, server: McpConnection, task: Task, policy: Policy) -> Outcome:
        config = self._config
        tools = await server.tools()
        hidden = [name for name in (config.setup_tool, config.reward_tool) if name is not None]
        offered = schemas(tools, config.tools, hidden)
        by_name = {tool.name: tool for tool in tools}

        async def use(tool_call: ToolCall) -> str | list[Mapping[str, Any]]:
            self._num_invalid += not fits_schema(by_name[tool_call.name], tool_call.arguments)
            try:
                result = await server.call(tool_call.name, dict(tool_call.arguments))
            except ToolRefused as refused:
                self._num_errors += 1
                return f"error: {printable(str(refused))[: config.max_output_chars]}"
            self._num_errors += bool(result.is_error)
            read = result_content if policy.sees_images else result_text
            return read(result, config.max_output_chars)

        first = None
        if config.setup_tool is not None:
            first = await self._call_hidden(server, config.setup_tool, tools, task)
        status = await converse(policy, first or None, offered, use)
        reward = 0.0
        if config.reward_tool is not None:
            reward = _number(await self._call_hidden(server, config.reward_tool, tools, task), config.reward_tool)
        return Outcome(
            reward=reward,
            metrics={"tool_errors": float(self._num_errors)},
            status=status,
            bad_tool_calls=self._num_invalid,
        )

    async def _call_hidden(self, server: McpConnection, name: str, tools: Sequence[ServerTool], task: Task) -> str:
        """Call a tool that is hidden from the policy and return its result."""
        schema = next(tool.input_schema for tool in tools if tool.name == name)
        prompt = task.prompt
        record = {**prompt.metadata, "prompt": prompt.messages or prompt.text, "answer": prompt.answer}
        arguments = _accepted_keys(schema, {**record, "seed": task.seed})
        try:
            result = await server.call(name, arguments)
        except ToolRefused as refused:
            raise _failed(name, str(refused)) from refused
        text = result_text(result, self._config.max_output_chars)
        if result.is_error:
            raise _failed(name, text)
        return text


def _accepted_keys(schema: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of the record that are not None and that the schema contains."""
    accepted = schema.get("properties")
    values = {key: value for key, value in record.items() if value is not None}
    return {key: values[key] for key in values if key in accepted} if isinstance(accepted, dict) else {}


def _number(text: str, tool: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise _failed(tool, f"its result is not a number: {text!r:.100}") from None


def _failed(tool: str, problem: str) -> EpisodeError:
    detail = printable(" ".join(problem.removeprefix("error: ").split()))[:500]
    return EpisodeError(f"the tool {tool} failed: {detail}", where="environment", hint="fix the server")


def build(config: McpConfig, context: TaskContext) -> McpEnvironment:
    """Build the environment of one episode. Raises `ConfigError` if a variable in `env` is not set."""
    if missing := [name for name in config.env if name not in os.environ]:
        raise ConfigError(
            f"the environment variable {missing[0]} is not set", where="environment.env", hint=f"export {missing[0]}=…"
        )
    program, *arguments = config.command
    if "/" in program:
        program = str(context.base_folder / Path(program).expanduser())
    environment = {name: os.environ[name] for name in (*_ALWAYS, *config.env) if name in os.environ}
    return McpEnvironment(config, ServerProcess([program, *arguments], environment, context.base_folder))
