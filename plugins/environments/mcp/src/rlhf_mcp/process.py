"""The process of an MCP server: what is read from it is bounded, and it is gone in the end."""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import anyio
from anyio.abc import AsyncResource
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared.message import SessionMessage
from mcp.types.jsonrpc import jsonrpc_message_adapter
from pydantic import ValidationError

from rlhf_core.util import printable

MAX_MESSAGE_BYTES = 8 * 2**20
"""Limit on one message of a server, which is a line."""
MAX_BYTES = 64 * 2**20
"""Limit on all messages of a server in one episode."""
_LEAVE_SECONDS = 2.0
"""So long a server may take to end by itself when its input is closed."""
_QUOTED_BYTES = 300

Streams = tuple[MemoryObjectReceiveStream[SessionMessage | Exception], MemoryObjectSendStream[SessionMessage]]


class ServerProcess:
    """A transport for the library's `Client`: `async with` starts the server and ends it with all that it started.

    In place of the library's own, which reads lines of any length, leaves behind what a server that has ended started,
    and hands on more of our environment.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        self.command = command
        self._environment = environment
        self._folder = folder
        self._process: Process
        self._tasks: list[asyncio.Task[None]] = []
        self.fault = "it has ended"
        """Why the connection has ended."""
        self._last_words = b""
        """The end of what it wrote to its standard error."""

    async def __aenter__(self) -> Streams:
        """Raises `OSError` where there is no such program."""
        self._process = await asyncio.create_subprocess_exec(
            *self.command,
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            env=self._environment,
            cwd=self._folder,
            start_new_session=True,
            limit=MAX_MESSAGE_BYTES,
        )
        to_session, incoming = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        outgoing, from_session = anyio.create_memory_object_stream[SessionMessage](0)
        parts = (self._listen(), self._read(to_session), self._write(from_session, to_session))
        self._tasks = [asyncio.create_task(part) for part in parts]
        return incoming, outgoing

    async def __aexit__(self, kind: type[BaseException] | None, *error: object) -> None:
        assert self._process.stdin is not None
        try:
            if kind is None:
                self._process.stdin.close()
                await self._ended()
        finally:
            self._kill()
            for task in self._tasks:
                task.cancel()
            await self._ended()
            # A process that left the group may hold our pipes; they are closed on our side.
            self._process._transport.close()  # type: ignore[attr-defined]
            await asyncio.wait(self._tasks)

    async def last_words(self) -> str:
        """As the end of a sentence; empty if there are none. Waits a moment for them."""
        await asyncio.wait(self._tasks[:1], timeout=_LEAVE_SECONDS)
        words = " ".join(self._last_words.decode(errors="replace").split())
        return f"; its last words: {printable(words)}" if words else ""

    async def _ended(self) -> None:
        """Wait a moment for its end; `Process.wait` would also wait for who else holds its pipes."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_SECONDS):
                while self._process.returncode is None:
                    await asyncio.sleep(0.01)

    def _kill(self) -> None:
        """End the server and what it started, but for what has left its process group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _read(self, to_session: MemoryObjectSendStream[SessionMessage | Exception]) -> None:
        """Until its output ends or the session is over; a server whose output can be no session's is killed."""
        assert self._process.stdout is not None
        left, line = MAX_BYTES, b""
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            async with to_session:
                try:
                    while left >= 0 and (line := await self._process.stdout.readline()):
                        left -= len(line)
                        if line.lstrip().startswith(b"{"):  # some servers greet on their standard output
                            message = jsonrpc_message_adapter.validate_json(line, by_name=False)
                            await to_session.send(SessionMessage(message))
                    if line:
                        self._give_up(f"it wrote more than {MAX_BYTES} bytes")
                except ValidationError:
                    quoted = printable(line[:_QUOTED_BYTES].decode(errors="replace").strip())
                    self._give_up(f"it wrote a line that is no message: {quoted}")
                except ValueError:
                    self._give_up(f"it wrote a line of more than {MAX_MESSAGE_BYTES} bytes")

    def _give_up(self, fault: str) -> None:
        self.fault = fault
        self._kill()

    async def _write(self, session: MemoryObjectReceiveStream[SessionMessage], to_session: AsyncResource) -> None:
        """Until either side ends; the session then sees that the connection has ended."""
        assert self._process.stdin is not None
        async with to_session, session:
            with suppress(ConnectionError):
                async for message in session:
                    text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                    self._process.stdin.write(text.encode() + b"\n")
                    await self._process.stdin.drain()

    async def _listen(self) -> None:
        assert self._process.stderr is not None
        while written := await self._process.stderr.read(2**16):
            self._last_words = (self._last_words + written)[-_QUOTED_BYTES:]
