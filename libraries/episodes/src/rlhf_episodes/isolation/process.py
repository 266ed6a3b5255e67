"""A process of environments, as the run that started it sees it: starting, hearing, watching and ending it."""

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
    Answer,
    BadMessage,
    Frames,
    FromChild,
    Make,
    OfEpisode,
    Play,
    Ready,
    read_from_child,
    to_child,
)

_MAX_OUTPUT_BYTES = 8 << 20
_WINDOW_SECONDS = 10.0
"""More than `_MAX_OUTPUT_BYTES` within so long is a flood."""
_SHOWN_BYTES = 1 << 18
"""Bytes passed on of those printed within that time."""
_CHUNK_BYTES = 1 << 16
_LOOK_SECONDS = 0.1
"""Between two looks at its memory."""
_MAX_UNANSWERED = 100_000
"""Messages that it may write without being told anything."""

logger = logging.getLogger(__name__)


class RunningEpisode(Protocol):
    """An episode that is played in a process."""

    clock: Clock

    def take(self, message: OfEpisode) -> None:
        """Handle a message. Raises `BadMessage` for one that no proxy sends."""

    def lose(self, what: str, *, is_suspect: bool) -> None:
        """The process has ended for having done `what`."""


class EnvironmentProcess(ChildProcess):
    """A child and the episodes that are played in it; of one event loop at a time."""

    def __init__(self, make: Make, name: str, *, is_alone: bool, memory_limit_bytes: int | None) -> None:
        """is_alone: it plays a single episode, whose fault is whatever it does."""
        self.is_alone = is_alone
        self.episodes: dict[int, RunningEpisode] = {}
        """By number of the episode."""
        self.is_over = False
        self._numbers = itertools.count()
        self._make: Make | None = make
        """None once it is told."""
        self._name = name
        self._frames = Frames(MAX_MESSAGE_BYTES)
        self._unanswered = 0
        self._fault = ""
        """Why it was killed; empty if it was not."""
        self._waiting: list[bytes] = []
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
        """Go on with the running loop; at first, wait until the environment's code is imported there.

        Raises what the import raises, `PluginError` where it ends the process, and `DeadlineError`.
        """
        self._tasks = [asyncio.ensure_future(self._watch())]
        if self._make is not None:
            try:
                await self._import(self._make)
            except BaseException:
                self.end()
                raise
            self._make = None
        self._tasks.append(asyncio.ensure_future(self._listen()))

    async def _import(self, make: Make) -> None:
        where = f"environment {self._name}"
        hint = "see what its module does when it is imported, or say environment.isolate: false"
        self.tell(make)
        try:
            said = await asyncio.wait_for(self._hear(), START_SECONDS)
        except TimeoutError:
            told = f"its process was not ready within {START_SECONDS:g} s"
            raise DeadlineError(told, where=where, hint=hint) from None
        except BadMessage as fault:
            told = f"when it was imported in a process of its own, it {fault}"
            raise PluginError(told, where=where, hint=hint) from None
        if isinstance(said, Ready) and said.error is not None:
            raise said.error.error()

    @property
    def is_at_rest(self) -> bool:
        """Whether it has no episode, and was told all that it is to be told."""
        return not (self.episodes or self._waiting)

    def add(self, episode: RunningEpisode) -> int:
        """Add an episode; returns its number."""
        number = next(self._numbers)
        self.episodes[number] = episode
        return number

    def tell(self, message: Make | Play | Answer) -> None:
        """Send a message, together with all else of this turn of the loop. Raises what pickling raises."""
        self._waiting.append(to_child(message))
        self._unanswered = 0
        if len(self._waiting) == 1:
            self._sending = asyncio.ensure_future(self._send())

    async def _send(self) -> None:
        with suppress(OSError):  # `_hear` says how it ended
            while self._waiting:
                count, data = len(self._waiting), b"".join(self._waiting)
                await asyncio.get_running_loop().sock_sendall(self.connection, data)
                del self._waiting[:count]

    async def _hear(self) -> FromChild:
        """The next message. Raises `BadMessage` where it has ended or says something else."""
        while (frame := self._frames.take()) is None:
            try:
                data = await asyncio.get_running_loop().sock_recv(self.connection, _CHUNK_BYTES)
            except OSError:
                data = b""
            if not data:
                raise BadMessage(self._fault or self.death())
            self._frames.feed(data)
            await asyncio.sleep(0)  # one that writes on and on does not hold up the loop
        return read_from_child(frame)

    async def _listen(self) -> None:
        """Give each message to its episode; what is said of one that is over does not matter."""
        try:
            while True:
                message = await self._hear()
                self._unanswered += 1
                if self._unanswered > _MAX_UNANSWERED:
                    raise BadMessage(f"wrote {_MAX_UNANSWERED:,} messages without an answer")
                if not isinstance(message, Ready) and (episode := self.episodes.get(message.episode)) is not None:
                    episode.take(message)
        except BadMessage as fault:
            self.fail(str(fault))

    def fail(self, what: str) -> None:
        """End it because it did `what`. Each episode whose call ran is a suspect, or each one if no call ran."""
        if self.is_over:
            return
        episodes = [*self.episodes.values()]
        self.episodes.clear()
        self.end()
        suspects = [each for each in episodes if each.clock.is_running] or episodes
        if episodes and not self.is_alone:
            logger.warning(
                "environment %s: its process %s; %d episodes whose code ran then are played again one by one, %d other "
                "ones in a new process",
                self._name,
                what,
                len(suspects),
                len(episodes) - len(suspects),
            )
        for each in episodes:
            each.lose(what, is_suspect=each in suspects)

    def end(self) -> None:
        """Kill it, once. Its episodes are not told."""
        if not self.is_over:
            self.is_over = True
            for task in self._tasks:
                task.cancel()
            super().end()

    async def _watch(self) -> None:
        while not (excess := self.excess()):
            await asyncio.sleep(_LOOK_SECONDS)
        self._kill_for(excess)

    def _kill_for(self, what: str) -> None:
        """Kill it; `_hear` then tells why. From any thread."""
        self._fault = what
        self.kill()


class _OutputPipe:
    """A pipe for a child's stdout and stderr, read on a thread until the child and all it started have closed it."""

    def __init__(self, name: str, flooded: Callable[[str], None]) -> None:
        """flooded: called on the thread, once, with what was done; what comes after that is read and left out.

        `write_end` is for the child and is to be closed here once it has its copy.
        """
        self._read_end, self.write_end = os.pipe()
        self._name = name
        self._flooded = flooded
        self._thread = BoundedThread(self._pass_on, f"output of {name}")
        self._thread.start()

    def _pass_on(self) -> None:
        since, count, flooded = time.monotonic(), 0, False
        try:
            while chunk := os.read(self._read_end, _CHUNK_BYTES):
                if (now := time.monotonic()) - since > _WINDOW_SECONDS:
                    since, count = now, 0
                if count < _SHOWN_BYTES:
                    _show(printable(chunk.decode(errors="replace")))
                    if count + len(chunk) >= _SHOWN_BYTES:
                        _show(f"\n[what {self._name} prints within the next {_WINDOW_SECONDS:g} s is left out]\n")
                count += len(chunk)
                if count > _MAX_OUTPUT_BYTES and not flooded:
                    flooded = True
                    self._flooded(f"printed more than {_MAX_OUTPUT_BYTES:,} bytes within {_WINDOW_SECONDS:g} s")
        finally:  # a child that prints on must not wait for a reader
            os.close(self._read_end)


def _show(text: str) -> None:
    if sys.__stderr__ is not None:
        sys.__stderr__.write(text)
        sys.__stderr__.flush()
