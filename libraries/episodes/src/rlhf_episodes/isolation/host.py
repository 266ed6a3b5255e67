"""Isolated environments in the run: one child process for all episodes, and one for each suspect episode."""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import AsyncIterator, Awaitable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from rlhf_core.columns import Columns
from rlhf_core.errors import ConfigError, EpisodeError, RlhfError
from rlhf_core.plugins.selected import Recipe
from rlhf_core.util.redact import printable

from ..attempt import Caller, EnvironmentFault
from ..clock import Clock
from ..contract import Endpoint, Environment, Outcome, Policy, Reply, Task
from ..episode import EpisodePolicy
from ..progress import EpisodeLost, Progress
from ..workers import SPARE_THREADS
from .messages import (
    BadMessage,
    CallStarted,
    EndpointRequest,
    EpisodeEnded,
    EpisodeFailed,
    EpisodeMessage,
    ForkRequest,
    ImportRequest,
    StartEpisode,
    StepRecorded,
    TurnCanceled,
    TurnRequest,
    TurnResult,
    to_picklable,
)
from .process import EnvironmentProcess

MAX_BRANCHES = 10_000
"""Limit on the branches of one episode."""


class IsolatedEnvironments:
    """Environments of one player. Their shared process starts with the first episode and is kept until `close`."""

    def __init__(self, recipe: Recipe, *, name: str, concurrency: int, memory_limit_bytes: int | None) -> None:
        """Prepare to start processes.

        Args:
            recipe: Builds the environment.
            name: The environment's name in errors.
            concurrency: Maximum number of episodes played at once.
            memory_limit_bytes: Resident memory at which a process is killed. None is half of the available memory.

        Raises `ConfigError` if the recipe cannot be pickled.
        """
        try:
            request = ImportRequest(pickle.dumps(recipe), concurrency + SPARE_THREADS)
        except Exception as error:  # pickling third-party options may raise anything
            raise ConfigError(
                f"its options cannot be sent to a child process: {error}",
                where=f"environment {name}",
                hint="set environment.isolate: false",
            ) from error
        self._new_process = partial(EnvironmentProcess, request, name, memory_limit_bytes=memory_limit_bytes)
        self._shared: EnvironmentProcess | None = None
        self.begin_session()

    def begin_session(self) -> None:
        """Prepare for a session, which has its own event loop."""
        self._opening = asyncio.Lock()
        self._suspects: set[int] = set()
        """Ids of samples that may have ended a process. Each is played in its own process from then on."""
        self._suspect_slots = asyncio.Semaphore(2 * (os.cpu_count() or 1))
        self._opened: set[EnvironmentProcess] = set()
        self.num_starting = 0
        """Number of processes being started. Read from any thread."""

    def end_session(self) -> None:
        """Detach from the event loop. The shared process is kept if it is idle, and all others are killed."""
        for process in self._opened:
            if process.is_dedicated or not process.is_idle:
                process.end()

    def close(self) -> None:
        """End the shared process."""
        if self._shared is not None:
            self._shared.end()

    async def make(self, call: Caller) -> Environment:
        """Create an environment for one attempt at an episode, whose clock is in `call`."""
        assert isinstance(call.clock, Clock)
        return IsolatedEnvironment(self, call.clock, call.progress)

    @asynccontextmanager
    async def process_for(self, sample_id: int) -> AsyncIterator[EnvironmentProcess]:
        """Provide a process for an episode of a sample: the shared one, or a dedicated one for a suspect."""
        if sample_id not in self._suspects:
            async with self._opening:
                if self._shared is None or self._shared.is_over:
                    self._shared = self._new_process(is_dedicated=False)
                if self._shared not in self._opened:
                    await self._open(self._shared)
                process = self._shared
            yield process
            return
        async with self._suspect_slots:
            process = self._new_process(is_dedicated=True)
            try:
                await self._open(process)
                yield process
            finally:
                process.end()

    def suspect(self, sample_id: int) -> None:
        """Play this sample in its own process from now on."""
        self._suspects.add(sample_id)

    async def _open(self, process: EnvironmentProcess) -> None:
        self._opened.add(process)
        self.num_starting += 1
        try:
            await process.open()
        finally:
            self.num_starting -= 1


class IsolatedEnvironment:
    """An `Environment` that plays its episode in a child process (`RunningEpisode`)."""

    def __init__(self, environments: IsolatedEnvironments, clock: Clock, progress: Progress) -> None:
        self.clock = clock
        self._progress = progress
        self._environments = environments
        self._process: EnvironmentProcess
        self._number: int
        self._sample_id: int
        self._branches: dict[int, EpisodePolicy] = {}
        self._turns: dict[int, asyncio.Task[None]] = {}
        self._loop = asyncio.get_running_loop()
        self._outcome: asyncio.Future[Outcome] = self._loop.create_future()

    async def run(self, task: Task, policy: Policy) -> Outcome:
        """Play the episode in a child process. The clock is stopped until the process has started.

        Raises the environment's `EnvironmentFault` or `RlhfError`, and `EpisodeLost` if the process ended and the
        episode must be played again.
        """
        assert isinstance(policy, EpisodePolicy)
        self.clock.stop()
        self._sample_id = task.sample_id
        self._branches[0] = policy
        async with self._environments.process_for(task.sample_id) as self._process:
            process = self._process
            if process.is_over:  # it ended before this episode was added
                raise EpisodeLost
            self._number = process.add(self)
            try:
                return await self._play(task, policy)
            finally:
                process.episodes.pop(self._number, None)
                for turn in self._turns.values():
                    turn.cancel()

    async def _play(self, task: Task, policy: EpisodePolicy) -> Outcome:
        process = self._process
        try:
            steps, is_recorded = self._progress.steps, self._progress.record is not None
            # Columns, such as pixels, are not for environments, and their tensors would make the child import torch.
            task = replace(task, prompt=replace(task.prompt, columns=Columns()))
            process.send(StartEpisode(self._number, task, policy.state, steps, is_recorded))
        except Exception as error:  # pickling third-party metadata may raise anything
            raise EpisodeError(
                f"its task cannot be sent to the environment's process: {error}",
                where=f"prompt {task.prompt.position}",
                hint="use plain values in the prompts' records, or set environment.isolate: false",
            ) from error
        if not process.is_dedicated:  # another episode's call may block the process
            self.clock.on_expired = partial(process.fail, "is blocked")
        self.clock.call_name = "its constructor"
        self.clock.start()
        return await self._outcome

    def process_ended(self, fault: str, *, is_suspect: bool) -> None:
        """See `RunningEpisode`."""
        if is_suspect:
            self._environments.suspect(self._sample_id)
        self._finish(EnvironmentFault(fault) if self._process.is_dedicated else EpisodeLost())

    def _finish(self, result: Outcome | Exception) -> None:
        if self._outcome.done():
            return
        if isinstance(result, Outcome):
            self._outcome.set_result(result)
        else:
            self._outcome.set_exception(result)
            self._outcome.exception()  # mark as retrieved, since no one may await it

    def handle(self, message: EpisodeMessage) -> None:
        """See `RunningEpisode`."""
        if self._outcome.done():
            return
        match message:
            case CallStarted():
                self.clock.call_name = printable(message.call)
                self.clock.start()
            case TurnRequest():
                self._start_task(message.turn, self._turn(message))
            case EndpointRequest():
                first = self._branches[0]
                self._start_task(message.turn, self._send_result(message.turn, first, first.endpoint()))
            # Tasks start in the next iteration of the loop. The following wait for it too, to keep the order.
            case ForkRequest():
                self._loop.call_soon(self._fork, message)
            case TurnCanceled():
                self._loop.call_soon(self._cancel_turn, message)
            case StepRecorded():
                if self._progress.record is not None:
                    self._progress.record(message.step())
            case EpisodeEnded():
                self._finish(message.outcome)  # validated later, like any environment's outcome
            case EpisodeFailed(fault=fault, error=error):
                self._finish(EnvironmentFault(printable(fault)) if error is None else error.error())

    def _start_task(self, turn: int, coroutine: Coroutine[Any, Any, None]) -> None:
        if turn in self._turns:
            coroutine.close()
            raise BadMessage("requested a turn twice")
        self._turns[turn] = self._loop.create_task(coroutine)

    async def _turn(self, request: TurnRequest) -> None:
        policy = self._branches.get(request.branch)
        if policy is None:
            return self._process.fail("requested a turn in a branch that does not exist")
        turn = policy.turn(request.messages, request.tools, request.stop, request.options, request.compaction)
        await self._send_result(request.turn, policy, turn)

    async def _send_result(self, turn: int, policy: EpisodePolicy, call: Awaitable[Reply | Endpoint]) -> None:
        """Await a call of `policy` and send its result or error, unless the episode is over."""
        reply: Reply | Endpoint | Exception
        try:
            reply = await call
        except EpisodeLost as lost:
            self._finish(lost)
            reply = RuntimeError("the episode starts again")
        except Exception as error:  # the environment handles the policy's errors
            reply = to_picklable(error)
        finally:
            self._turns.pop(turn, None)
        if not (self._outcome.done() or self._process.is_over):
            self._process.send(TurnResult(self._number, turn, reply, policy.state))

    def _cancel_turn(self, message: TurnCanceled) -> None:
        if (turn := self._turns.get(message.turn)) is not None:
            turn.cancel()

    def _fork(self, request: ForkRequest) -> None:
        policy = self._branches.get(request.branch)
        if self._outcome.done() or self._process.is_over:
            return
        if policy is None or request.new in self._branches or len(self._branches) > MAX_BRANCHES:
            return self._process.fail("requested an invalid branch")
        try:
            self._branches[request.new] = policy.fork()
        except (ValueError, RlhfError) as error:
            self._process.fail(f"requested an invalid branch: {error}")
