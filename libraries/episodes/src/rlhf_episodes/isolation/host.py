"""The processes of a player's environments: one for all episodes, and one more for an episode that has to be alone."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from rlhf_containment.processes.child import default_memory_limit_bytes
from rlhf_core.errors import ConfigError
from rlhf_core.plugins.recipe import Recipe

from ..attempt import Caller
from ..clock import Clock
from ..contract import Environment
from ..workers import SPARE_THREADS
from .flight import Flight
from .process import EnvironmentProcess


class IsolatedEnvironments:
    """Environments of one player. Their process is started with the first episode and kept until `close`."""

    def __init__(self, recipe: Recipe, *, name: str, concurrency: int, memory_limit_bytes: int | None) -> None:
        """memory_limit_bytes: resident memory at which the process is ended; None is half of what there is.

        Raises `ConfigError` where the recipe cannot be sent to another process.
        """
        try:
            self._recipe = pickle.dumps(recipe)
        except Exception as error:  # pickling a stranger's options may raise anything
            raise ConfigError(
                f"its options cannot be sent to a process of its own: {error}",
                where=f"environment {name}",
                hint="say environment.isolate: false",
            ) from error
        self._name = name
        self._num_threads = concurrency + SPARE_THREADS
        self._memory_limit_bytes = memory_limit_bytes or default_memory_limit_bytes()
        self._lock = threading.Lock()
        self._idle: list[EnvironmentProcess] = []
        self._closed = False

    def take_process(self) -> EnvironmentProcess:
        """One that is kept, or a new one; not attached."""
        with self._lock:
            kept = self._idle.pop() if self._idle else None
        if kept is not None:
            if kept.is_usable:
                return kept
            kept.end()
        return self.new_process()

    def new_process(self) -> EnvironmentProcess:
        return EnvironmentProcess(
            self._recipe, self._name, num_threads=self._num_threads, memory_limit_bytes=self._memory_limit_bytes
        )

    def keep(self, process: EnvironmentProcess) -> None:
        """Keep a detached process for the next `play`."""
        with self._lock:
            if not self._closed:
                self._idle.append(process)
                return
        process.end()

    def close(self) -> None:
        """End the processes that are kept."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for process in idle:
            process.end()


class Sitting:
    """The processes of one `play`, on its event loop."""

    def __init__(self, environments: IsolatedEnvironments) -> None:
        self._environments = environments
        self._shared: asyncio.Task[EnvironmentProcess] | None = None
        self._alone: set[int] = set()
        """Samples that may have ended a process; each is played by itself from then on."""
        self._one_at_a_time = asyncio.Lock()
        self._processes: set[EnvironmentProcess] = set()
        self.num_starting = 0
        """Processes on their way. Read from any thread."""

    async def make(self, call: Caller) -> Environment:
        """An environment for one try at an episode. `call` has the clock of it."""
        assert isinstance(call.clock, Clock)
        return Flight(self, call.clock)

    @asynccontextmanager
    async def seat(self, sample_id: int) -> AsyncIterator[EnvironmentProcess]:
        """A process for an episode of that sample."""
        if sample_id not in self._alone:
            starting = self._shared
            if starting is None or (starting.done() and _alive(starting) is None):
                starting = self._shared = asyncio.ensure_future(self._attach(self._environments.take_process))
            yield await asyncio.shield(starting)
            return
        async with self._one_at_a_time:
            process = await self._attach(self._environments.new_process)
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
        process.end()

    def leave(self) -> None:
        """Let go of the loop: a process that is at rest is kept, any other ended."""
        shared = None if self._shared is None else _alive(self._shared)
        for process in [*self._processes]:
            if process is shared and not process.passengers:
                process.detach()
                if not process.is_over:
                    self._environments.keep(process)
            else:
                self._end(process)


def _alive(starting: asyncio.Task[EnvironmentProcess]) -> EnvironmentProcess | None:
    """The process that was started, as long as it lives."""
    if not starting.done() or starting.cancelled() or starting.exception() is not None or starting.result().is_over:
        return None
    return starting.result()
