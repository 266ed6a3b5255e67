"""The process of isolated environments: `python -m rlhf_episodes.isolation.inside.worker SOCKET PARENT`.

It imports what it is told to make, then plays episodes until the other side is gone.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from rlhf_core.distributed.parent_watch import killed_with_parent
from rlhf_core.errors import PluginError, RlhfError

from ...attempt import Caller, EnvironmentFault, Make, run_environment, said
from ...contract import Task
from ...idle import WatchedSelector
from ...shapes import new_environment
from ...workers import Workers
from ..messages import (
    MAX_TEXT_CHARS,
    Answer,
    Doing,
    Ended,
    ErrorTold,
    Failed,
    Frames,
    FromChild,
    OfEpisode,
    Opening,
    Pong,
    Ready,
    to_host,
)
from .policy import RemoteEpisode


def main(descriptor: int, parent: int) -> None:
    """Serve the connection behind `descriptor`. Ends when it closes or when the parent process is gone."""
    killed_with_parent(parent)
    Worker().serve(socket.socket(fileno=descriptor))


class Worker(asyncio.Protocol):
    """The episodes of this process, on its one event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.SelectorEventLoop(WatchedSelector(self._waits))
        self._frames = Frames(None)
        self._transport: asyncio.WriteTransport | None = None
        self._told: list[bytes] = []
        self._make: Make | None = None
        self._workers: Workers | None = None
        self._episodes: dict[int, RemoteEpisode] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def serve(self, connection: socket.socket) -> None:
        """Until the connection closes, which ends the process: code that hangs in it would not let it exit."""
        self._loop.run_until_complete(self._loop.create_unix_connection(lambda: self, sock=connection))
        while True:
            # What a task raises is for whoever awaits it; SystemExit goes through the loop all the same.
            with suppress(SystemExit, KeyboardInterrupt):
                self._loop.run_forever()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        sys.stdout.flush()
        os._exit(0)

    def data_received(self, data: bytes) -> None:
        for frame in self._frames.feed(data):
            match pickle.loads(frame):  # noqa: S301 - from the run that started this process, over a socket pair
                case ("make", bytes(recipe), int(num_threads)):
                    self._prepare(recipe, num_threads)
                case ("play", int(number), Task() as task, Opening() as opening):
                    self._start(number, task, opening)
                case ("answer", int(number), int(turn), Answer() as answer):
                    if (episode := self._episodes.get(number)) is not None:
                        episode.answered(turn, answer)
                case ("ping", int(number)):
                    self._tell(Pong(ping=number))

    def _prepare(self, recipe: bytes, num_threads: int) -> None:
        """Import the environment's code; its process ends where that fails."""
        try:
            build: Callable[[], Any] = pickle.loads(recipe).builder()  # noqa: S301 - as above
        except RlhfError as error:
            return self._tell(Ready(error=ErrorTold.of(error)))
        except BaseException as error:  # a stranger's module may raise anything
            told = PluginError(f"its process cannot import it: it {said(error)}"[:MAX_TEXT_CHARS])
            return self._tell(Ready(error=ErrorTold.of(told)))
        self._workers = Workers(self._loop, num_threads, "environment")
        self._make = partial(new_environment, build)
        self._tell(Ready())

    def _start(self, number: int, task: Task, opening: Opening) -> None:
        episode = self._episodes[number] = RemoteEpisode(number, task, opening, self._tell)
        playing = self._loop.create_task(self._play(episode))
        self._tasks.add(playing)
        playing.add_done_callback(self._tasks.discard)

    async def _play(self, episode: RemoteEpisode) -> None:
        assert self._make is not None and self._workers is not None
        clock = _ToldClock(episode.number, self._tell_now)
        try:
            found = await run_environment(self._make, Caller(clock, self._workers), episode)
            told: OfEpisode = Ended(
                episode=episode.number,
                reward=found.reward,
                turn_rewards=[*found.turn_rewards.items()],
                metrics=dict(found.metrics),
                status=found.status,
                bad_tool_calls=found.bad_tool_calls,
                columns=dict(found.columns),
            )
        except RlhfError as error:
            told = Failed(episode=episode.number, error=ErrorTold.of(error))
        except EnvironmentFault as error:
            told = _failed(episode, str(error))
        except asyncio.CancelledError:
            told = _failed(episode, "was cancelled by itself")
        except Exception as error:  # a stranger's environment may raise anything
            told = _failed(episode, said(error))
        episode.close()
        del self._episodes[episode.number]
        self._tell(told)

    def _tell(self, message: FromChild) -> None:
        """Send it as soon as there is nothing else to do, together with what else is to be said then."""
        self._told.append(to_host(message))

    def _tell_now(self, message: FromChild) -> None:
        """Send it at once: what comes next may hold up everything."""
        self._tell(message)
        self._waits(True)

    def _waits(self, waits: bool) -> None:
        if waits and self._told and self._transport is not None:
            told, self._told = self._told, []
            self._transport.write(b"".join(told))


class _ToldClock:
    """Tells the run, which keeps the deadlines, of every call (`CallClock`)."""

    def __init__(self, episode: int, tell: Callable[[OfEpisode], None]) -> None:
        self.doing = "run"
        self._episode = episode
        self._tell = tell

    def start(self) -> None:
        self._tell(Doing(episode=self._episode, call=self.doing[:MAX_TEXT_CHARS]))


def _failed(episode: RemoteEpisode, fault: str) -> Failed:
    return Failed(episode=episode.number, fault=fault[:MAX_TEXT_CHARS])


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
