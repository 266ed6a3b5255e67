"""Child process of an MCP server. Its output is limited, and it is killed at the end."""

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
"""Limit on one message of a server, which is one line."""
MAX_BYTES = 64 * 2**20
"""Limit on all messages of a server in one episode."""
_LEAVE_SECONDS = 2.0
"""Grace period for a server to exit after its input is closed."""
_QUOTED_BYTES = 300

Streams = tuple[MemoryObjectReceiveStream[SessionMessage | Exception], MemoryObjectSendStream[SessionMessage]]


class ServerProcess:
    """A transport for the library's `Client`. `async with` starts the server and kills it with its descendants.

    The library's own transport reads lines of any length, does not kill the descendants of a server that has exited,
    and passes more environment variables.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        self.command = command
        self._environment = environment
        self._folder = folder
        self._process: Process
        self._tasks: list[asyncio.Task[None]] = []
        self.fault = "it has ended"
        """Reason why the connection ended."""
        self._stderr = b""
        """Last bytes of its standard error."""

    async def __aenter__(self) -> Streams:
        """Start the server. Raises `OSError` if the program does not exist."""
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
        parts = (self._read_stderr(), self._read(to_session), self._write(from_session, to_session))
        self._tasks = [asyncio.create_task(part) for part in parts]
        return incoming, outgoing

    async def __aexit__(self, kind: type[BaseException] | None, *error: object) -> None:
        assert self._process.stdin is not None
        try:
            if kind is None:
                self._process.stdin.close()
                await self._wait_for_exit()
        finally:
            self._kill()
            for task in self._tasks:
                task.cancel()
            await self._wait_for_exit()
            # A descendant outside the process group may hold the pipes open, so close them on this side.
            self._process._transport.close()  # type: ignore[attr-defined]
            await asyncio.wait(self._tasks)

    async def stderr_end(self) -> str:
        """Return the end of standard error to append to a message, or an empty text. Waits briefly for output."""
        await asyncio.wait(self._tasks[:1], timeout=_LEAVE_SECONDS)
        words = " ".join(self._stderr.decode(errors="replace").split())
        return f" (end of its standard error: {printable(words)})" if words else ""

    async def _wait_for_exit(self) -> None:
        """Wait briefly for its exit. `Process.wait` would also wait for descendants that hold its pipes."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_SECONDS):
                while self._process.returncode is None:
                    await asyncio.sleep(0.01)

    def _kill(self) -> None:
        """Kill the server and its descendants, except those that have left its process group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _read(self, to_session: MemoryObjectSendStream[SessionMessage | Exception]) -> None:
        """Read messages until the output or the session ends. A server with invalid output is killed."""
        assert self._process.stdout is not None
        bytes_left, line = MAX_BYTES, b""
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            async with to_session:
                try:
                    while bytes_left >= 0 and (line := await self._process.stdout.readline()):
                        bytes_left -= len(line)
                        if line.lstrip().startswith(b"{"):  # some servers print a greeting to standard output
                            message = jsonrpc_message_adapter.validate_json(line, by_name=False)
                            await to_session.send(SessionMessage(message))
                    if line:
                        self._fail(f"it wrote more than {MAX_BYTES} bytes")
                except ValidationError:
                    quoted = printable(line[:_QUOTED_BYTES].decode(errors="replace").strip())
                    self._fail(f"it wrote an invalid message: {quoted}")
                except ValueError:
                    self._fail(f"it wrote a line of more than {MAX_MESSAGE_BYTES} bytes")

    def _fail(self, fault: str) -> None:
        self.fault = fault
        self._kill()

    async def _write(self, session: MemoryObjectReceiveStream[SessionMessage], to_session: AsyncResource) -> None:
        """Write messages until either side ends. The session then sees a closed connection."""
        assert self._process.stdin is not None
        async with to_session, session:
            with suppress(ConnectionError):
                async for message in session:
                    text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                    self._process.stdin.write(text.encode() + b"\n")
                    await self._process.stdin.drain()

    async def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        while data := await self._process.stderr.read(2**16):
            self._stderr = (self._stderr + data)[-_QUOTED_BYTES:]
