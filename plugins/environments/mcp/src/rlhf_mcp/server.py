"""An MCP server of one episode, driven on a thread with an event loop of its own.

The loop of the episode may be gone before a server that hangs has ended; this one stays until it has.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from mcp import Client, MCPError
from mcp.types import CONNECTION_CLOSED, CallToolResult, Tool

from rlhf_core.errors import EpisodeError, RlhfError, first_line
from rlhf_core.util import printable

from .process import ServerProcess

T = TypeVar("T")
MAX_TOOLS = 128
_MAX_PAGES = 64
_HINT = "mend the server, or set environment.on_failure: zero or drop"


class ToolRefused(Exception):
    """The server did not make a call; the text can be told to who asked for it."""


class Server:
    """Opened, asked one thing after another, and closed or killed; all by one episode."""

    def __init__(self, process: ServerProcess) -> None:
        self.doing = ""
        """The call in progress, in words; empty where there is none."""
        self._process = process
        self._loop = asyncio.new_event_loop()
        self._client: Client
        self._closing = asyncio.Event()
        self._opened: Future[None] = Future()
        self._over: Future[None] = Future()
        for future in (self._opened, self._over):
            future.set_running_or_notify_cancel()  # who waits for them and gives up does not cancel them
        self._main_task = self._loop.create_task(self._main())
        threading.Thread(target=self._serve, name="mcp", daemon=True).start()

    async def open(self) -> None:
        """Wait until it speaks MCP. Raises `ConfigError` where there is no such program, else `EpisodeError`."""
        await self._wait("starting", self._opened)

    async def tools(self) -> list[Tool]:
        """All that it lists. Raises `EpisodeError`, also for more than `MAX_TOOLS`."""
        return await self._ask("listing its tools", self._list_tools())

    async def call(self, name: str, arguments: dict[str, Any]) -> CallToolResult:
        """Call a tool. Raises `ToolRefused` for an error about the call, `EpisodeError` for any other."""
        return await self._ask(f"calling its tool {printable(name)}", self._call_tool(name, arguments))

    async def close(self) -> None:
        """Let it end, with its input closed and a moment's time, and wait until it has."""
        self._tell(self._closing.set)
        await self._wait("ending", self._over)

    def kill(self) -> None:
        """End it now, without waiting. Nothing where it has ended."""
        self._tell(self._main_task.cancel)

    def _tell(self, function: Any) -> None:
        with suppress(RuntimeError):  # its loop is closed: it has ended
            self._loop.call_soon_threadsafe(function)

    async def _ask(self, what: str, answer: Coroutine[Any, Any, T]) -> T:
        return await self._wait(what, asyncio.run_coroutine_threadsafe(self._explained(what, answer), self._loop))

    async def _wait(self, what: str, future: Future[T]) -> T:
        self.doing = what
        found = await asyncio.wrap_future(future)
        self.doing = ""
        return found

    # What follows runs on the thread.

    def _serve(self) -> None:
        try:
            with suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._main_task)
            self._loop.run_until_complete(_end_others())
        finally:
            self._loop.close()
            self._over.set_result(None)

    async def _main(self) -> None:
        try:
            async with Client(self._process, cache=None) as self._client:
                self._opened.set_result(None)
                await self._closing.wait()
        except BaseException as error:  # of the library's tasks: a group
            if not self._opened.done():
                self._opened.set_exception(await self._explanation("starting", _first(error)))

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

    async def _explained(self, what: str, answer: Coroutine[Any, Any, T]) -> T:
        try:
            return await answer
        except ToolRefused:
            raise
        except Exception as error:
            raise await self._explanation(what, error) from error

    async def _explanation(self, what: str, error: BaseException) -> RlhfError:
        if isinstance(error, RlhfError):
            return error
        is_closed = isinstance(error, MCPError) and error.error.code == CONNECTION_CLOSED
        if is_closed:
            await self._process.settle()
        said = "" if is_closed else f"{printable(first_line(error))}; "
        story = self._process.story()
        return EpisodeError(f"the MCP server failed while {what}: {said}{story}", where="environment", hint=_HINT)


def _first(error: BaseException) -> BaseException:
    """The first error of a group of groups."""
    while parts := getattr(error, "exceptions", None):
        error = parts[0]
    return error


async def _end_others() -> None:
    """Let what the library left behind end, as `asyncio.run` does."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
