"""The process of an MCP server: what is written to it and read from it is bounded, and it is gone in the end."""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TypeAlias

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared.message import SessionMessage
from mcp.types.jsonrpc import jsonrpc_message_adapter

from rlhf_core.errors import ConfigError
from rlhf_core.util import printable

MAX_MESSAGE_BYTES = 8 * 2**20
"""Limit on one message of a server, which is a line."""
MAX_BYTES = 64 * 2**20
"""Limit on all messages of a server in one episode."""
LEAVE_SECONDS = 2.0
"""So long a server may take to end by itself when its input is closed."""
_REAP_SECONDS = 5.0
_LAST_WORDS_BYTES = 2_000
_MAX_QUOTED_CHARS = 300

Received: TypeAlias = SessionMessage | Exception
Streams = tuple[MemoryObjectReceiveStream[Received], MemoryObjectSendStream[SessionMessage]]


class ServerProcess:
    """A transport for the library's `Client`: `async with` starts the server and ends it with all that it started.

    In place of the library's own, which hands on more of our environment, reads lines of any length, and leaves a
    process behind where the event loop ends first.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        self._command = command
        self._environment = environment
        self._folder = folder
        self._process: Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._last_words = b""
        """The end of what it wrote to its standard error."""
        self._fault: str | None = None
        """Why it was ended."""

    async def __aenter__(self) -> Streams:
        program, *arguments = self._command
        if "/" in program:
            program = str(self._folder / Path(program).expanduser())
        try:
            self._process = await asyncio.create_subprocess_exec(
                program,
                *arguments,
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
                env=self._environment,
                cwd=self._folder,
                start_new_session=True,
                limit=MAX_MESSAGE_BYTES,
            )
        except OSError as error:
            raise ConfigError(
                f"{printable(program)} does not start: {error.strerror or error}",
                where="environment.command",
                hint="name a program that PATH finds, or a file that is executable and begins with #!",
            ) from error
        to_session, incoming = anyio.create_memory_object_stream[Received](0)
        outgoing, from_session = anyio.create_memory_object_stream[SessionMessage](0)
        reader = asyncio.create_task(self._read(to_session))
        writer = asyncio.create_task(self._write(from_session, to_session))
        self._tasks = [reader, writer, asyncio.create_task(self._listen())]
        return incoming, outgoing

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._process
        if process is None:
            return
        try:
            if error is None and process.stdin is not None:
                process.stdin.close()
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(_ended(process), LEAVE_SECONDS)
        finally:
            await self._end(process)

    async def _end(self, process: Process) -> None:
        self._kill()
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(_ended(process), _REAP_SECONDS)
        # A process that left the group may hold our pipes; they are closed on our side.
        process._transport.close()  # type: ignore[attr-defined]
        await asyncio.sleep(0)

    def story(self) -> str:
        """How the process ended, for errors: why it was ended, or its exit code, and its last output."""
        process = self._process
        told = self._fault or "it still runs"
        if self._fault is None and process is not None and process.returncode is not None:
            code = process.returncode
            told = f"it ended with exit code {code}" if code >= 0 else f"it was ended by signal {-code}"
        words = " ".join(self._last_words.decode(errors="replace").split())
        return f"{told}; its last words: {printable(words[-_MAX_QUOTED_CHARS:])}" if words else told

    async def settle(self) -> None:
        """Wait a moment for its end and its last words, where its output has ended."""
        process = self._process
        if process is None or self._fault is not None:
            return
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(_ended(process), LEAVE_SECONDS)
        await asyncio.wait(self._tasks[2:], timeout=LEAVE_SECONDS)

    def _kill(self) -> None:
        """End the server and what it started, but for what has left its process group."""
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _read(self, to_session: MemoryObjectSendStream[Received]) -> None:
        assert self._process is not None and self._process.stdout is not None
        total = 0
        async with to_session:
            while True:
                try:
                    line = await self._process.stdout.readline()
                except ValueError:
                    self._give_up(f"it wrote a line of more than {MAX_MESSAGE_BYTES} bytes")
                    return
                total += len(line)
                if total > MAX_BYTES:
                    self._give_up(f"it wrote more than {MAX_BYTES} bytes")
                    return
                if not line:
                    return
                if not line.lstrip().startswith(b"{"):
                    continue  # some servers greet on their standard output
                try:
                    message = jsonrpc_message_adapter.validate_json(line, by_name=False)
                except ValueError:
                    quoted = line.decode(errors="replace").strip()
                    self._give_up(f"it wrote a line that is no message: {printable(quoted[:_MAX_QUOTED_CHARS])}")
                    return
                try:
                    await to_session.send(SessionMessage(message))
                except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                    return

    def _give_up(self, fault: str) -> None:
        self._fault = fault
        self._kill()

    async def _write(
        self,
        from_session: MemoryObjectReceiveStream[SessionMessage],
        to_session: MemoryObjectSendStream[Received],
    ) -> None:
        assert self._process is not None and self._process.stdin is not None
        async with from_session:
            with suppress(ConnectionError):
                async for message in from_session:
                    text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                    self._process.stdin.write(text.encode() + b"\n")
                    await self._process.stdin.drain()
                return
        await to_session.aclose()  # the session then sees that the connection has ended

    async def _listen(self) -> None:
        assert self._process is not None and self._process.stderr is not None
        while written := await self._process.stderr.read(2**16):
            self._last_words = (self._last_words + written)[-_LAST_WORDS_BYTES:]


async def _ended(process: Process) -> None:
    """Wait until it has ended; `Process.wait` would also wait for who else holds its pipes."""
    while process.returncode is None:
        await asyncio.sleep(0.01)
