"""The process of an isolated environment: `python -m rlhf_episodes.isolation.worker SOCKET PARENT`.

It imports the environment's code, then plays episodes until the run closes the connection. It imports neither torch
nor transformers.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

from rlhf_containment.processes.parent_watch import killed_with_parent
from rlhf_core.errors import PluginError, RlhfError
from rlhf_core.plugins.selected import Recipe

from ..attempt import Caller, EnvironmentFault, MakeEnvironment, describe_error, run_environment
from ..idle import WatchedSelector
from ..shapes import new_environment
from ..shared import EnvironmentMaker, is_shared
from ..workers import Workers
from .messages import MAX_TEXT_CHARS, ErrorMessage, FrameReader, ImportRequest, StartEpisode, TurnResult, to_host
from .policy import RemoteEpisode

_CHUNK_BYTES = 1 << 16


class EnvironmentWorker:
    """The event loop of the child and the episodes it plays."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._frames = FrameReader()
        self._loop = asyncio.SelectorEventLoop(WatchedSelector(self._flush))
        self._outgoing: list[bytes] = []
        self._make: MakeEnvironment
        self._workers: Workers
        self._episodes: dict[int, RemoteEpisode] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def serve(self) -> None:
        """Serve until the connection closes, which ends the process even if other code hangs."""
        self._loop.add_reader(self._connection, self._read)
        while True:
            # A task raises its errors to its awaiter, but a SystemExit also leaves the loop.
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
                case ImportRequest(recipe=recipe, num_threads=num_threads):
                    self._workers = Workers(self._loop, num_threads, "environment")
                    self._send({"type": "ready", "error": self._import(recipe)})
                case StartEpisode() as start:
                    episode = self._episodes[start.episode] = RemoteEpisode(start, self._send)
                    task = self._loop.create_task(self._play(episode))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                case TurnResult() as result:
                    if result.episode in self._episodes:
                        self._episodes[result.episode].set_result(result)

    def _import(self, recipe: bytes) -> dict[str, Any] | None:
        """Import the environment's code. Return the error as a message for the run, or None."""
        try:
            found: Recipe = pickle.loads(recipe)  # noqa: S301 - as above
            maker = EnvironmentMaker(found.builder(), shared=is_shared(found.name), key=found.name)
            maker.open()
        except RlhfError as error:
            return ErrorMessage.of(error).model_dump()
        except BaseException as error:  # third-party code may raise anything
            problem = PluginError(f"its process cannot import it: it {describe_error(error)}"[:MAX_TEXT_CHARS])
            return ErrorMessage.of(problem).model_dump()
        self._make = partial(new_environment, maker)
        return None

    async def _play(self, episode: RemoteEpisode) -> None:
        message: dict[str, Any]
        try:
            call = Caller(episode, self._workers, episode.progress)
            outcome = await run_environment(self._make, call, episode.task, episode.policy())
            message = {"type": "ended", "outcome": asdict(outcome)}
        except RlhfError as error:
            message = {"type": "failed", "error": ErrorMessage.of(error).model_dump()}
        except asyncio.CancelledError:
            message = {"type": "failed", "fault": "canceled itself"}
        except Exception as error:  # third-party code may raise anything
            fault = str(error) if isinstance(error, EnvironmentFault) else describe_error(error)
            message = {"type": "failed", "fault": fault[:MAX_TEXT_CHARS]}
        episode.send(message)
        episode.close()
        del self._episodes[episode.number]

    def _send(self, message: Mapping[str, Any], at_once: bool = False) -> None:
        """Send a message at once, or batched with others when the loop is idle."""
        self._outgoing.append(to_host(message))
        self._flush(at_once)

    def _flush(self, is_idle: bool) -> None:
        if is_idle and self._outgoing:
            messages, self._outgoing = self._outgoing, []
            self._connection.sendall(b"".join(messages))


def main(descriptor: int, parent: int) -> None:
    """Serve the socket `descriptor` until it closes or the parent process exits."""
    killed_with_parent(parent)
    EnvironmentWorker(socket.socket(fileno=descriptor)).serve()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
