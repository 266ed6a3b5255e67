"""An MCP server of one episode, asked one thing after another."""

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
_HINT = "mend the server, or set environment.on_failure: zero or drop"


class ToolRefused(Exception):
    """The server did not make a call; the text can be told to who asked for it."""


class Server:
    """A process that speaks MCP."""

    def __init__(self, process: ServerProcess) -> None:
        self.doing = ""
        """The call in progress, in words; empty where there is none."""
        self._process = process
        self._client: Client

    async def serve(self, play: Callable[[], Awaitable[T]]) -> T:
        """Start it, play, and let it end with its input closed and a moment's time; a cancelled play ends it at once.

        Raises what `play` raises, `ConfigError` where there is no such program, else `EpisodeError`.
        """
        found: T | Exception
        self.doing = "starting"
        try:
            async with Client(self._process, cache=None) as self._client:
                self.doing = ""
                try:
                    found = await play()
                except Exception as error:  # raised on, it would come out of the library in a group
                    found = error
                self.doing = "ending"
        except Exception as error:  # of the library's tasks: a group
            raise await self._explanation(self.doing, _first(error)) from error
        if isinstance(found, Exception):
            raise found
        return found

    async def tools(self) -> list[Tool]:
        """All that it lists. Raises `EpisodeError`, also for more than `MAX_TOOLS`."""
        return await self._ask("listing its tools", self._list_tools())

    async def call(self, name: str, arguments: dict[str, Any]) -> CallToolResult:
        """Call a tool. Raises `ToolRefused` for an error about the call, `EpisodeError` for any other."""
        return await self._ask(f"calling its tool {printable(name)}", self._call_tool(name, arguments))

    async def _ask(self, what: str, answer: Awaitable[T]) -> T:
        self.doing = what
        try:
            found = await answer
        except ToolRefused:
            raise
        except Exception as error:
            raise await self._explanation(what, error) from error
        self.doing = ""
        return found

    async def _list_tools(self) -> list[Tool]:
        found: list[Tool] = []
        cursor = None
        for _ in range(_MAX_PAGES):
            page = await self._client.list_tools(cursor=cursor)
            found += page.tools
            cursor = page.next_cursor
            if len(found) > MAX_TOOLS:
                break
            if cursor is None:
                return found
        raise EpisodeError(
            f"the MCP server lists more than {MAX_TOOLS} tools, or never ends listing them",
            where="environment.command",
            hint="have it offer fewer; they stand in every prompt",
        )

    async def _call_tool(self, name: str, arguments: dict[str, Any]) -> CallToolResult:
        try:
            return await self._client.call_tool(name, arguments)
        except MCPError as error:
            if error.error.code == CONNECTION_CLOSED:
                raise
            raise ToolRefused(error.error.message) from error

    async def _explanation(self, what: str, error: BaseException) -> RlhfError:
        if isinstance(error, RlhfError):
            return error
        if isinstance(error, OSError) and what == "starting":
            return ConfigError(
                f"{printable(self._process.command[0])} does not start: {error.strerror or error}",
                where="environment.command",
                hint="name a program that PATH finds, or a file that is executable and begins with #!",
            )
        is_closed = isinstance(error, MCPError) and error.error.code == CONNECTION_CLOSED
        said = (self._process.fault if is_closed else printable(first_line(error))) + await self._process.last_words()
        return EpisodeError(f"the MCP server failed while {what}: {said}", where="environment", hint=_HINT)


def _first(error: BaseException) -> BaseException:
    """The first error of a group of groups."""
    while parts := getattr(error, "exceptions", None):
        error = parts[0]
    return error
