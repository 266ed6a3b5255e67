"""The processes of a player's environments: one for all episodes, and one each for those that have to be alone."""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from rlhf_containment.processes.pool import ProcessPool
from rlhf_core.errors import ConfigError
from rlhf_core.plugins.selected import Recipe

from ..attempt import Caller
from ..clock import Clock
from ..contract import Environment
from ..workers import SPARE_THREADS
from .episode import IsolatedEpisode
from .process import EnvironmentProcess


class IsolatedEnvironments:
    """Environments of one player. Their process is started with the first episode and kept until `close`."""

    def __init__(self, recipe: Recipe, *, name: str, concurrency: int, memory_limit_bytes: int | None) -> None:
        """memory_limit_bytes: resident memory at which the process is ended; None is half of what there is.

        Raises `ConfigError` where the recipe cannot be sent to another process.
        """
        try:
            pickled = pickle.dumps(recipe)
        except Exception as error:  # pickling a stranger's options may raise anything
            raise ConfigError(
                f"its options cannot be sent to a process of its own: {error}",
                where=f"environment {name}",
                hint="say environment.isolate: false",
            ) from error
        self.pool = ProcessPool(
            partial(
                EnvironmentProcess,
                pickled,
                name,
                num_threads=concurrency + SPARE_THREADS,
                memory_limit_bytes=memory_limit_bytes,
            )
        )

    def close(self) -> None:
        """End the processes that are kept."""
        self.pool.close()


class PlayProcesses:
    """The processes of one `play`, on its event loop."""

    def __init__(self, environments: IsolatedEnvironments) -> None:
        self._pool = environments.pool
        self._shared: asyncio.Task[EnvironmentProcess] | None = None
        self._alone: set[int] = set()
        """Samples that may have ended a process; each is played by itself from then on."""
        self._alone_at_once = asyncio.Semaphore(2 * (os.cpu_count() or 1))
        self._processes: set[EnvironmentProcess] = set()
        self.num_starting = 0
        """Processes on their way. Read from any thread."""

    async def make(self, call: Caller) -> Environment:
        """An environment for one try at an episode. `call` has the clock of it."""
        assert isinstance(call.clock, Clock)
        return IsolatedEpisode(self.process_for, self.suspect, call.clock)

    @asynccontextmanager
    async def process_for(self, sample_id: int) -> AsyncIterator[EnvironmentProcess]:
        """A process for an episode of that sample."""
        if sample_id not in self._alone:
            starting = self._shared
            if starting is None or (starting.done() and _alive(starting) is None):
                starting = self._shared = asyncio.ensure_future(self._attach(self._pool.take))
            yield await asyncio.shield(starting)
            return
        async with self._alone_at_once:
            process = await self._attach(partial(self._pool.take, new=True))
            try:
                yield process
            finally:
                self._end(process)

    def suspect(self, sample_id: int) -> None:
        """From now on, play this sample in a process by itself."""
        self._alone.add(sample_id)

    async def _attach(self, take: Callable[[], EnvironmentProcess]) -> EnvironmentProcess:
        self.num_starting += 1
        try:
            process = take()
            self._processes.add(process)
            await process.attach()
        finally:
            self.num_starting -= 1
        return process

    def _end(self, process: EnvironmentProcess) -> None:
        self._processes.discard(process)
        self._pool.end(process)

    def leave(self) -> None:
        """Let go of the loop: a process that is at rest is kept, any other ended."""
        shared = None if self._shared is None else _alive(self._shared)
        for process in [*self._processes]:
            if process is shared and not process.episodes:
                process.detach()
                self._pool.keep(process)
            else:
                self._end(process)


def _alive(starting: asyncio.Task[EnvironmentProcess]) -> EnvironmentProcess | None:
    """The process that was started, as long as it lives."""
    if not starting.done() or starting.cancelled() or starting.exception() is not None or starting.result().is_over:
        return None
    return starting.result()
