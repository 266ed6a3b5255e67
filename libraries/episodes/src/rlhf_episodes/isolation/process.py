"""A child process of environments, managed by the run: starting it, exchanging messages, watching and killing it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from rlhf_containment.processes.child import START_SECONDS, ChildProcess
from rlhf_core.errors import DeadlineError, PluginError
from rlhf_core.util.bounded_thread import BoundedThread
from rlhf_core.util.redact import printable

from ..clock import Clock
from .messages import (
    MAX_MESSAGE_BYTES,
    BadMessage,
    EpisodeMessage,
    FrameReader,
    FromChild,
    ImportRequest,
    Ready,
    StartEpisode,
    TurnResult,
    read_from_child,
    to_child,
)

_MAX_OUTPUT_BYTES = 8 << 20
_WINDOW_SECONDS = 10.0
"""A child that prints more than `_MAX_OUTPUT_BYTES` in this time is killed."""
_SHOWN_BYTES = 1 << 18
"""Maximum bytes of output that are shown in that time."""
_CHUNK_BYTES = 1 << 16
_MEMORY_CHECK_SECONDS = 0.1
_MAX_UNANSWERED = 100_000
"""Maximum number of messages that a child may send without receiving one."""

logger = logging.getLogger(__name__)


class RunningEpisode(Protocol):
    """An episode that is played in a child process."""

    clock: Clock

    def handle(self, message: EpisodeMessage) -> None:
        """Handle a message of the child. Raises `BadMessage` if the child's proxy cannot have sent it."""

    def process_ended(self, fault: str, *, is_suspect: bool) -> None:
        """Handle the end of the process. `is_suspect`: this episode may have caused the fault."""


class EnvironmentProcess(ChildProcess):
    """A child process and the episodes played in it. It belongs to one event loop at a time."""

    def __init__(self, setup: ImportRequest, name: str, *, is_dedicated: bool, memory_limit_bytes: int | None) -> None:
        """Start the process. A dedicated process plays a single episode, which is to blame for any fault."""
        self.is_dedicated = is_dedicated
        self.episodes: dict[int, RunningEpisode] = {}
        """Running episodes by number."""
        self.is_over = False
        self._numbers = itertools.count()
        self._import_request: ImportRequest | None = setup
        """None once the import has finished."""
        self._name = name
        self._frames = FrameReader(MAX_MESSAGE_BYTES)
        self._num_unanswered = 0
        self._fault = ""
        """Why the process was killed, or empty if it was not."""
        self._outgoing: list[bytes] = []
        self._tasks: list[asyncio.Task[None]] = []
        output = _OutputPipe(f"environment {name}", self._kill_for)
        try:
            super().__init__(
                "rlhf_episodes.isolation.worker", memory_limit_bytes=memory_limit_bytes, output=output.write_end
            )
        finally:
            os.close(output.write_end)
        self.connection.setblocking(False)

    async def open(self) -> None:
        """Attach to the running event loop. The first time, wait until the child has imported the environment's code.

        Raises the errors of the import, `PluginError` if the import ends the process, and `DeadlineError`.
        """
        self._tasks = [asyncio.ensure_future(self._watch_memory())]
        if self._import_request is not None:
            try:
                await self._import(self._import_request)
            except BaseException:
                self.end()
                raise
            self._import_request = None
        self._tasks.append(asyncio.ensure_future(self._dispatch()))

    async def _import(self, request: ImportRequest) -> None:
        where = f"environment {self._name}"
        hint = "check what its module does when it is imported, or set environment.isolate: false"
        self.send(request)
        try:
            message = await asyncio.wait_for(self._receive(), START_SECONDS)
        except TimeoutError:
            problem = f"its process was not ready within {START_SECONDS:g} s"
            raise DeadlineError(problem, where=where, hint=hint) from None
        except BadMessage as fault:
            problem = f"when a child process imported it, it {fault}"
            raise PluginError(problem, where=where, hint=hint) from None
        if isinstance(message, Ready) and message.error is not None:
            raise message.error.error()

    @property
    def is_idle(self) -> bool:
        """Whether the process has neither episodes nor unsent messages."""
        return not (self.episodes or self._outgoing)

    def add(self, episode: RunningEpisode) -> int:
        """Add an episode and return its number."""
        number = next(self._numbers)
        self.episodes[number] = episode
        return number

    def send(self, message: ImportRequest | StartEpisode | TurnResult) -> None:
        """Send a message, batched with others of this loop iteration. Raises the errors of pickling."""
        self._outgoing.append(to_child(message))
        self._num_unanswered = 0
        if len(self._outgoing) == 1:
            self._sending = asyncio.ensure_future(self._send_all())

    async def _send_all(self) -> None:
        with suppress(OSError):  # `_receive` reports why the connection ended
            while self._outgoing:
                count, data = len(self._outgoing), b"".join(self._outgoing)
                await asyncio.get_running_loop().sock_sendall(self.connection, data)
                del self._outgoing[:count]

    async def _receive(self) -> FromChild:
        """Return the next message. Raises `BadMessage` if it is invalid or the process has ended."""
        while (frame := self._frames.take()) is None:
            try:
                data = await asyncio.get_running_loop().sock_recv(self.connection, _CHUNK_BYTES)
            except OSError:
                data = b""
            if not data:
                raise BadMessage(self._fault or self.death())
            self._frames.feed(data)
            await asyncio.sleep(0)  # a child that never stops writing must not block the loop
        return read_from_child(frame)

    async def _dispatch(self) -> None:
        """Pass each message to its episode. Messages of finished episodes are dropped."""
        try:
            while True:
                message = await self._receive()
                self._num_unanswered += 1
                if self._num_unanswered > _MAX_UNANSWERED:
                    raise BadMessage(f"wrote {_MAX_UNANSWERED:,} messages without receiving one")
                if not isinstance(message, Ready) and (episode := self.episodes.get(message.episode)) is not None:
                    episode.handle(message)
        except BadMessage as fault:
            self.fail(str(fault))

    def fail(self, fault: str) -> None:
        """Kill the process because of a fault. Suspects are the episodes whose call was running, or all if none was."""
        if self.is_over:
            return
        episodes = [*self.episodes.values()]
        self.episodes.clear()
        self.end()
        suspects = [each for each in episodes if each.clock.is_running] or episodes
        if episodes and not self.is_dedicated:
            logger.warning(
                "environment %s: its process %s. %d episodes whose code was running are played again one by one, %d "
                "others in a new process",
                self._name,
                fault,
                len(suspects),
                len(episodes) - len(suspects),
            )
        for each in episodes:
            each.process_ended(fault, is_suspect=each in suspects)

    def end(self) -> None:
        """Kill the process, once, without notifying its episodes."""
        if not self.is_over:
            self.is_over = True
            for task in self._tasks:
                task.cancel()
            super().end()

    async def _watch_memory(self) -> None:
        while not (excess := self.excess()):
            await asyncio.sleep(_MEMORY_CHECK_SECONDS)
        self._kill_for(excess)

    def _kill_for(self, fault: str) -> None:
        """Kill the process because of a fault, which `_receive` then raises. Called on any thread."""
        self._fault = fault
        self.kill()


class _OutputPipe:
    """A pipe for a child's stdout and stderr, read on a thread until the child and its descendants have closed it."""

    def __init__(self, name: str, on_flood: Callable[[str], None]) -> None:
        """Open the pipe and start reading. Close `write_end` once the child has its copy.

        Args:
            name: Name of the child for messages.
            on_flood: Called once, on the reading thread, with a description of the flood. Later output is dropped.
        """
        self._read_end, self.write_end = os.pipe()
        self._name = name
        self._on_flood = on_flood
        self._thread = BoundedThread(self._show_output, f"output of {name}")
        self._thread.start()

    def _show_output(self) -> None:
        since, count, flooded = time.monotonic(), 0, False
        try:
            while chunk := os.read(self._read_end, _CHUNK_BYTES):
                if (now := time.monotonic()) - since > _WINDOW_SECONDS:
                    since, count = now, 0
                if count < _SHOWN_BYTES:
                    _show(printable(chunk.decode(errors="replace")))
                    if count + len(chunk) >= _SHOWN_BYTES:
                        _show(f"\n[output of {self._name} is not shown for up to {_WINDOW_SECONDS:g} s]\n")
                count += len(chunk)
                if count > _MAX_OUTPUT_BYTES and not flooded:
                    flooded = True
                    self._on_flood(f"printed more than {_MAX_OUTPUT_BYTES:,} bytes within {_WINDOW_SECONDS:g} s")
        finally:  # without a reader, a child that keeps printing gets an error instead of blocking
            os.close(self._read_end)


def _show(text: str) -> None:
    if sys.__stderr__ is not None:
        sys.__stderr__.write(text)
        sys.__stderr__.flush()
