"""One process of environments, as the run that started it sees it: starting, watching and ending it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Protocol

from rlhf_containment.processes.child import START_SECONDS, ChildProcess
from rlhf_core.errors import DeadlineError, PluginError
from rlhf_core.util.bounded_thread import BoundedThread
from rlhf_core.util.redact import printable

from ..clock import Clock
from .messages import (
    MAX_MESSAGE_BYTES,
    BadMessage,
    Command,
    Frames,
    OfEpisode,
    Pong,
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
_PONG_SECONDS = 1.0
"""So long one that can go on may take to say so."""
_MAX_UNANSWERED = 100_000
"""Messages that it may write without being told anything."""

logger = logging.getLogger(__name__)


class RunningEpisode(Protocol):
    """An episode that is played in a process."""

    clock: Clock

    def take(self, message: OfEpisode) -> None:
        """Handle a message. Raises `BadMessage` for one that no proxy sends."""

    def blame(self, what: str) -> None:
        """The process has ended, by the fault of this episode."""

    def lose(self, *, suspect: bool) -> None:
        """The process has ended; suspect: it may have been this episode's fault, or another's."""


class EnvironmentProcess(ChildProcess, asyncio.Protocol):
    """A child and the episodes that are played in it; of one event loop at a time."""

    def __init__(self, recipe: bytes, name: str, *, num_threads: int, memory_limit_bytes: int | None) -> None:
        """recipe: pickle of the `Recipe`. num_threads: maximum number of calls that it runs at once."""
        self.episodes: dict[int, RunningEpisode] = {}
        """By number of the episode."""
        self.is_over = False
        self._num_played = 0
        self._name = name
        self._frames = Frames(MAX_MESSAGE_BYTES)
        self._unanswered = 0
        self._pings = itertools.count()
        self._pongs: dict[int, asyncio.Future[None]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._ready: asyncio.Future[None] | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._flood = ""
        """Why it was killed for flooding; empty if it was not."""
        output = _OutputPipe(f"environment {name}", self._flooded)
        try:
            super().__init__(
                "rlhf_episodes.isolation.inside.worker", memory_limit_bytes=memory_limit_bytes, output=output.write_end
            )
        finally:
            os.close(output.write_end)
        self._waiting = [to_child("make", recipe, num_threads)]
        self._was_ready = False

    def add(self, episode: RunningEpisode) -> int:
        """Add an episode; returns its number."""
        self._num_played += 1
        self.episodes[self._num_played] = episode
        return self._num_played

    @property
    def is_alone(self) -> bool:
        """Whether its only episode is the only one it ever had, so that any fault is that one's."""
        return self._num_played == len(self.episodes) == 1

    async def attach(self) -> None:
        """Go on with the running loop; at first, wait until the environment's code is imported there.

        Raises what the import raises, `PluginError` where it ends the process, and `DeadlineError`.
        """
        self._loop = loop = asyncio.get_running_loop()
        same = self.connection.dup()
        same.setblocking(False)
        self._transport, _ = await loop.create_unix_connection(lambda: self, sock=same)
        self._ready = None if self._was_ready else loop.create_future()
        self._look()
        if self._ready is None:
            return
        self._flush()
        try:
            await asyncio.wait_for(self._ready, START_SECONDS)
            self._was_ready = True
        except asyncio.TimeoutError:
            raise DeadlineError(
                f"its process was not ready within {START_SECONDS:g} s",
                where=f"environment {self._name}",
                hint="see what its module does when it is imported, or say environment.isolate: false",
            ) from None
        finally:
            self._ready = None
            if not self._was_ready:
                self.end()

    def detach(self) -> None:
        """Let go of the loop; it has no episodes. What it says from now on waits."""
        self._forget_loop()
        if not self._frames.is_empty:
            self.end()

    def send(self, command: Command, *values: object) -> None:
        """Tell it something, together with all else of this turn of the loop. Raises what pickling raises."""
        frame = to_child(command, *values)
        self._unanswered = 0
        if not self._waiting and self._loop is not None:
            self._loop.call_soon(self._flush)
        self._waiting.append(frame)

    async def can_go_on(self) -> bool:
        """Whether it answers at once: no code in it holds Python's lock or its event loop."""
        if self.is_over:
            return False
        number = next(self._pings)
        pong = self._pongs[number] = asyncio.get_running_loop().create_future()
        self.send("ping", number)
        try:
            await asyncio.wait_for(pong, _PONG_SECONDS)
        except asyncio.TimeoutError:
            return False
        finally:
            del self._pongs[number]
        return True

    def fail(self, what: str) -> None:
        """End it because it did `what`.

        The fault is that of its only episode ever. Otherwise each episode whose call ran is a suspect, or each one if
        no call ran.
        """
        if self.is_over:
            return
        if self._ready is not None and not self._ready.done():
            error = PluginError(
                f"when it was imported in a process of its own, it {what}",
                where=f"environment {self._name}",
                hint="see what its module does when it is imported, or say environment.isolate: false",
            )
            return self._ready.set_exception(error)
        is_alone = self.is_alone
        episodes = self._emptied()
        suspects = [each for each in episodes if each.clock.is_running] or episodes
        if episodes and not is_alone:
            logger.warning(
                "environment %s: its process %s; %d episodes whose code ran then are played again one by one, %d other "
                "ones in a new process",
                self._name,
                what,
                len(suspects),
                len(episodes) - len(suspects),
            )
        for each in episodes:
            if is_alone:
                each.blame(what)
            else:
                each.lose(suspect=each in suspects)

    def end_without_suspects(self) -> None:
        """End it for the fault of an episode that has left it."""
        for each in self._emptied():
            each.lose(suspect=False)

    def _emptied(self) -> list[RunningEpisode]:
        """End it; the episodes that it had."""
        episodes = [*self.episodes.values()]
        self.episodes.clear()
        self.end()
        return episodes

    def end(self) -> None:
        """Kill it, once. Its episodes are not told."""
        if self.is_over:
            return
        self.is_over = True
        self._forget_loop()
        super().end()

    def _forget_loop(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if self._transport is not None:
            self._transport.abort()
        self._watch = self._transport = self._loop = None
        self._waiting.clear()

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        if self._transport is not None:
            self._transport.write(b"".join(waiting))

    def _look(self) -> None:
        if self._loop is None:
            return
        if excess := self.excess():
            return self.fail(excess)
        self._watch = self._loop.call_later(_LOOK_SECONDS, self._look)

    def _flooded(self) -> None:
        """On the thread that reads what it prints."""
        self._flood = f"printed more than {_MAX_OUTPUT_BYTES:,} bytes within {_WINDOW_SECONDS:g} s"
        self.kill()

    # What follows is called by the event loop.

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._frames.feed(data):
                self._take(frame)
        except BadMessage as error:
            self.fail(str(error))

    def _take(self, frame: bytes) -> None:
        self._unanswered += 1
        if self._unanswered > _MAX_UNANSWERED:
            raise BadMessage(f"wrote {_MAX_UNANSWERED:,} messages without an answer")
        message = read_from_child(frame)
        if self._ready is not None and not self._ready.done():
            if isinstance(message, Ready):
                if message.error is None:
                    self._ready.set_result(None)
                else:
                    self._ready.set_exception(message.error.error())
        elif isinstance(message, Pong):
            pong = self._pongs.get(message.ping)
            if pong is not None and not pong.done():
                pong.set_result(None)
        elif not isinstance(message, Ready):
            # Of one that is not there any more, whatever it still says does not matter.
            episode = self.episodes.get(message.episode)
            if episode is not None:
                episode.take(message)

    def connection_lost(self, error: Exception | None) -> None:
        if self._loop is not None and not self.is_over:
            self._loop.call_soon(self._died)

    def _died(self) -> None:
        if not self.is_over:
            self.fail(self._flood or self.death())


class _OutputPipe:
    """A pipe for a child's stdout and stderr, read on a thread until the child and all it started have closed it."""

    def __init__(self, name: str, flooded: Callable[[], None]) -> None:
        """flooded: called on the thread, once; what comes after that is read and left out. `write_end` is for the child
        and is to be closed here once it has its copy."""
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
                    self._flooded()
        finally:  # a child that prints on must not wait for a reader
            os.close(self._read_end)


def _show(text: str) -> None:
    if sys.__stderr__ is not None:
        sys.__stderr__.write(text)
        sys.__stderr__.flush()
