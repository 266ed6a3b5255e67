"""The process of an isolated environment: `python -m rlhf_episodes.isolation.worker SOCKET PARENT`.

It imports what it is told to make, then plays episodes until the other side is gone. It loads neither torch nor
transformers.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

from rlhf_containment.processes.parent_watch import killed_with_parent
from rlhf_core.errors import PluginError, RlhfError

from ..attempt import Caller, EnvironmentFault, run_environment, said
from ..attempt import Make as MakeEnvironment
from ..idle import WatchedSelector
from ..shapes import new_environment
from ..workers import Workers
from .messages import MAX_TEXT_CHARS, Answer, ErrorMessage, Frames, Make, Play, to_host
from .policy import RemoteEpisode

_CHUNK_BYTES = 1 << 16


class Worker:
    """The environment's code and the event loop of this process."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._frames = Frames()
        self._loop = asyncio.SelectorEventLoop(WatchedSelector(self._loop_waits))
        self._told: list[bytes] = []
        self._make: MakeEnvironment
        self._workers: Workers
        self._episodes: dict[int, RemoteEpisode] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def serve(self) -> None:
        """Until the connection closes, which ends the process: code that hangs in it would not let it exit."""
        self._loop.add_reader(self._connection, self._read)
        while True:
            # What a task raises is for whoever awaits it; SystemExit goes through the loop all the same.
            with suppress(SystemExit, KeyboardInterrupt):
                self._loop.run_forever()

    def _read(self) -> None:
        data = self._connection.recv(_CHUNK_BYTES)
        if not data:
            sys.stdout.flush()
            os._exit(0)
        self._frames.feed(data)
        while (frame := self._frames.take()) is not None:
            match pickle.loads(frame):  # noqa: S301 - from the run that started this process, over a socket pair
                case Make(recipe=recipe, num_threads=num_threads):
                    self._workers = Workers(self._loop, num_threads, "environment")
                    self._send({"say": "ready", "error": self._import(recipe)})
                case Play() as play:
                    episode = self._episodes[play.episode] = RemoteEpisode(play, self._send)
                    playing = self._loop.create_task(self._play(episode))
                    self._tasks.add(playing)
                    playing.add_done_callback(self._tasks.discard)
                case Answer() as answer:
                    if answer.episode in self._episodes:
                        self._episodes[answer.episode].answered(answer)

    def _import(self, recipe: bytes) -> dict[str, Any] | None:
        """Import the environment's code; the error, as the run is told of it."""
        try:
            build: Callable[[], Any] = pickle.loads(recipe).builder()  # noqa: S301 - as above
        except RlhfError as error:
            return ErrorMessage.of(error).model_dump()
        except BaseException as error:  # a stranger's module may raise anything
            told = PluginError(f"its process cannot import it: it {said(error)}"[:MAX_TEXT_CHARS])
            return ErrorMessage.of(told).model_dump()
        self._make = partial(new_environment, build)
        return None

    async def _play(self, episode: RemoteEpisode) -> None:
        told: dict[str, Any]
        try:
            found = await run_environment(self._make, Caller(episode, self._workers), episode.task, episode.policy())
            told = {"say": "ended", "outcome": asdict(found)}
        except RlhfError as error:
            told = {"say": "failed", "error": ErrorMessage.of(error).model_dump()}
        except asyncio.CancelledError:
            told = {"say": "failed", "fault": "was cancelled by itself"}
        except Exception as error:  # a stranger's environment may raise anything
            fault = str(error) if isinstance(error, EnvironmentFault) else said(error)
            told = {"say": "failed", "fault": fault[:MAX_TEXT_CHARS]}
        episode.tell(told)
        episode.close()
        del self._episodes[episode.number]

    def _send(self, message: Mapping[str, Any], at_once: bool = False) -> None:
        """Send it at once, or with what else is to be said when there is nothing else to do."""
        self._told.append(to_host(message))
        self._loop_waits(at_once)

    def _loop_waits(self, waits: bool) -> None:
        if waits and self._told:
            told, self._told = self._told, []
            self._connection.sendall(b"".join(told))


def main(descriptor: int, parent: int) -> None:
    """Serve the connection behind `descriptor`. Ends when it closes or when the parent process is gone."""
    killed_with_parent(parent)
    Worker(socket.socket(fileno=descriptor)).serve()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
