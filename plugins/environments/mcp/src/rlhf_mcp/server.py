"""Sequential calls to the MCP server of one episode."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from mcp import Client, MCPError
from mcp.types import CONNECTION_CLOSED, CallToolResult, Tool

from rlhf_core.errors import ConfigError, EpisodeError, RlhfError, first_line
from rlhf_core.util import printable

from .process import ServerProcess

T = TypeVar("T")
MAX_TOOLS = 128
_MAX_PAGES = 64
_HINT = "fix the server, or set environment.on_failure: zero or drop"


class ToolRefused(Exception):
    """The server rejected a call. The text can be shown to the policy."""


class McpConnection:
    """An MCP session with a server process."""

    def __init__(self, process: ServerProcess) -> None:
        self.current_call = ""
        """Description of the call in progress, or empty."""
        self._process = process
        self._client: Client

    async def serve(self, play: Callable[[], Awaitable[T]]) -> T:
        """Start the server, await `play`, then end the server, with a grace period unless `play` is canceled.

        Raises the errors of `play`, `ConfigError` if the program does not exist, and otherwise `EpisodeError`.
        """
        result: T | Exception
        self.current_call = "starting"
        try:
            async with Client(self._process, cache=None) as self._client:
                self.current_call = ""
                try:
                    result = await play()
                except Exception as error:  # the library would wrap it in an exception group
                    result = error
                self.current_call = "ending"
        except Exception as error:  # an exception group of the library's tasks
            raise await self._to_rlhf_error(self.current_call, _first(error)) from error
        if isinstance(result, Exception):
            raise result
        return result

    async def tools(self) -> list[Tool]:
        """Return all tools of the server. Raises `EpisodeError` if it fails or lists more than `MAX_TOOLS`."""
        return await self._await("listing its tools", self._list_tools())

    async def call(self, name: str, arguments: dict[str, Any]) -> CallToolResult:
        """Call a tool. Raises `ToolRefused` if the server rejects the call, and `EpisodeError` if the server fails."""
        return await self._await(f"calling its tool {printable(name)}", self._call_tool(name, arguments))

    async def _await(self, call: str, response: Awaitable[T]) -> T:
        self.current_call = call
        try:
            result = await response
        except ToolRefused:
            raise
        except Exception as error:
            raise await self._to_rlhf_error(call, error) from error
        self.current_call = ""
        return result

    async def _list_tools(self) -> list[Tool]:
        tools: list[Tool] = []
        cursor = None
        for _ in range(_MAX_PAGES):
            page = await self._client.list_tools(cursor=cursor)
            tools += page.tools
            cursor = page.next_cursor
            if len(tools) > MAX_TOOLS:
                break
            if cursor is None:
                return tools
        raise EpisodeError(
            f"the MCP server lists more than {MAX_TOOLS} tools, or its list never ends",
            where="environment.command",
            hint="have it offer fewer, since every prompt contains them",
        )

    async def _call_tool(self, name: str, arguments: dict[str, Any]) -> CallToolResult:
        try:
            return await self._client.call_tool(name, arguments)
        except MCPError as error:
            if error.error.code == CONNECTION_CLOSED:
                raise
            raise ToolRefused(error.error.message) from error

    async def _to_rlhf_error(self, call: str, error: BaseException) -> RlhfError:
        if isinstance(error, RlhfError):
            return error
        if isinstance(error, OSError) and call == "starting":
            return ConfigError(
                f"{printable(self._process.command[0])} does not start: {error.strerror or error}",
                where="environment.command",
                hint="use a program in PATH, or an executable file that starts with #!",
            )
        is_closed = isinstance(error, MCPError) and error.error.code == CONNECTION_CLOSED
        cause = (self._process.fault if is_closed else printable(first_line(error))) + await self._process.stderr_end()
        return EpisodeError(f"the MCP server failed while {call}: {cause}", where="environment", hint=_HINT)


def _first(error: BaseException) -> BaseException:
    """Return the first error in nested exception groups."""
    while parts := getattr(error, "exceptions", None):
        error = parts[0]
    return error
