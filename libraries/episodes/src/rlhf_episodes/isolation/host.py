"""Environments in processes of their own: one for all episodes, and one each for those that have to be alone."""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import AsyncIterator, Awaitable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from rlhf_core.errors import ConfigError, EpisodeError, RlhfError
from rlhf_core.plugins.selected import Recipe
from rlhf_core.util.redact import printable

from ..attempt import Caller, EnvironmentFault, EpisodeLost
from ..clock import Clock
from ..contract import Endpoint, Environment, Outcome, Policy, Reply, Task
from ..episode import EpisodePolicy
from ..workers import SPARE_THREADS
from .messages import (
    Answer,
    BadMessage,
    Doing,
    Ended,
    EndpointRequest,
    Failed,
    ForkRequest,
    Make,
    OfEpisode,
    Play,
    TurnCanceled,
    TurnRequest,
    picklable,
)
from .process import EnvironmentProcess

MAX_BRANCHES = 10_000
"""An environment that forks more often has run wild."""


class IsolatedEnvironments:
    """Environments of one player. Their process is started with the first episode and kept until `close`."""

    def __init__(self, recipe: Recipe, *, name: str, concurrency: int, memory_limit_bytes: int | None) -> None:
        """memory_limit_bytes: resident memory at which a process is ended; None is half of what there is.

        Raises `ConfigError` where the recipe cannot be sent to another process.
        """
        try:
            make = Make(pickle.dumps(recipe), concurrency + SPARE_THREADS)
        except Exception as error:  # pickling a stranger's options may raise anything
            raise ConfigError(
                f"its options cannot be sent to a process of its own: {error}",
                where=f"environment {name}",
                hint="say environment.isolate: false",
            ) from error
        self._new = partial(EnvironmentProcess, make, name, memory_limit_bytes=memory_limit_bytes)
        self._shared: EnvironmentProcess | None = None
        self.begin()

    def begin(self) -> None:
        """A play begins, on an event loop of its own."""
        self._opening = asyncio.Lock()
        self._alone: set[int] = set()
        """Samples that may have ended a process; each is played by itself from then on."""
        self._alone_at_once = asyncio.Semaphore(2 * (os.cpu_count() or 1))
        self._opened: set[EnvironmentProcess] = set()
        self.num_starting = 0
        """Processes on their way. Read from any thread."""

    def leave(self) -> None:
        """Let go of the loop: a process that is at rest is kept, any other ended."""
        for process in self._opened:
            if process.is_alone or not process.is_at_rest:
                process.end()

    def close(self) -> None:
        """End the process that is kept."""
        if self._shared is not None:
            self._shared.end()

    async def make(self, call: Caller) -> Environment:
        """An environment for one try at an episode. `call` has the clock of it."""
        assert isinstance(call.clock, Clock)
        return IsolatedEnvironment(self, call.clock)

    @asynccontextmanager
    async def process_for(self, sample_id: int) -> AsyncIterator[EnvironmentProcess]:
        """A process for an episode of that sample."""
        if sample_id not in self._alone:
            async with self._opening:
                if self._shared is None or self._shared.is_over:
                    self._shared = self._new(is_alone=False)
                if self._shared not in self._opened:
                    await self._open(self._shared)
                process = self._shared
            yield process
            return
        async with self._alone_at_once:
            process = self._new(is_alone=True)
            try:
                await self._open(process)
                yield process
            finally:
                process.end()

    def suspect(self, sample_id: int) -> None:
        """From now on, play this sample in a process by itself."""
        self._alone.add(sample_id)

    async def _open(self, process: EnvironmentProcess) -> None:
        self._opened.add(process)
        self.num_starting += 1
        try:
            await process.open()
        finally:
            self.num_starting -= 1


class IsolatedEnvironment:
    """An environment in the form that core drives, which plays its episode in another process (`RunningEpisode`)."""

    def __init__(self, environments: IsolatedEnvironments, clock: Clock) -> None:
        self.clock = clock
        self._environments = environments
        self._process: EnvironmentProcess
        self._number: int
        self._sample_id: int
        self._branches: dict[int, EpisodePolicy] = {}
        self._turns: dict[int, asyncio.Task[None]] = {}
        self._loop = asyncio.get_running_loop()
        self._outcome: asyncio.Future[Outcome] = self._loop.create_future()

    async def run(self, task: Task, policy: Policy) -> Outcome:
        """Have the environment run. The clock rests until there is a process.

        Raises `EnvironmentFault` or an `RlhfError` as its environment does, `EpisodeLost` where its process ended and
        it is to be made again.
        """
        assert isinstance(policy, EpisodePolicy)
        self.clock.stop()
        self._sample_id = task.sample_id
        self._branches[0] = policy
        async with self._environments.process_for(task.sample_id) as self._process:
            process = self._process
            if process.is_over:  # it ended while this one was on its way to it
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
            process.tell(Play(self._number, task, policy.state))
        except Exception as error:  # pickling a stranger's metadata may raise anything
            raise EpisodeError(
                f"its task cannot be sent to the environment's process: {error}",
                where=f"prompt {task.prompt.position}",
                hint="give plain values in the prompts' records, or say environment.isolate: false",
            ) from error
        if not process.is_alone:  # it may be held up by another's call
            self.clock.when_over = partial(process.fail, "does not go on")
        self.clock.doing = "its constructor"
        self.clock.start()
        return await self._outcome

    def lose(self, what: str, *, is_suspect: bool) -> None:
        """The process is gone."""
        if is_suspect:
            self._environments.suspect(self._sample_id)
        self._end(EnvironmentFault(what) if self._process.is_alone else EpisodeLost())

    def _end(self, how: Outcome | Exception) -> None:
        if self._outcome.done():
            return
        if isinstance(how, Outcome):
            self._outcome.set_result(how)
        else:
            self._outcome.set_exception(how)
            self._outcome.exception()  # taken: whoever waited for it may be gone

    def take(self, message: OfEpisode) -> None:
        """Raises `BadMessage` for what no proxy says."""
        if self._outcome.done():
            return
        match message:
            case Doing():
                self.clock.doing = printable(message.call)
                self.clock.start()
            case TurnRequest():
                self._answer(message.turn, self._turn(message))
            case EndpointRequest():
                self._answer(message.turn, self._reply(message.turn, self._branches[0], self._branches[0].endpoint()))
            # What asks for an answer begins in the next turn of the loop; this waits for that, so all keep their order.
            case ForkRequest():
                self._loop.call_soon(self._fork, message)
            case TurnCanceled():
                self._loop.call_soon(self._leave, message)
            case Ended():
                self._end(message.outcome)  # which is checked as that of any environment
            case Failed(fault=fault, error=error):
                self._end(EnvironmentFault(printable(fault)) if error is None else error.error())

    def _answer(self, turn: int, answer: Coroutine[Any, Any, None]) -> None:
        if turn in self._turns:
            answer.close()
            raise BadMessage("asked for one turn twice")
        self._turns[turn] = self._loop.create_task(answer)

    async def _turn(self, asked: TurnRequest) -> None:
        policy = self._branches.get(asked.branch)
        if policy is None:
            return self._process.fail("asked for a turn in a branch that is not there")
        turn = policy.turn(asked.messages, asked.tools, asked.stop, asked.options)
        await self._reply(asked.turn, policy, turn)

    async def _reply(self, turn: int, policy: EpisodePolicy, asked: Awaitable[Reply | Endpoint]) -> None:
        """Send what comes of `asked`, a call of `policy`; nobody waits for it once the episode is over."""
        reply: Reply | Endpoint | Exception
        try:
            reply = await asked
        except Exception as error:  # what a policy raises is for its environment
            reply = picklable(error)
        finally:
            self._turns.pop(turn, None)
        if not (self._outcome.done() or self._process.is_over):
            self._process.tell(Answer(self._number, turn, reply, policy.state))

    def _leave(self, left: TurnCanceled) -> None:
        if (turn := self._turns.get(left.turn)) is not None:
            turn.cancel()

    def _fork(self, asked: ForkRequest) -> None:
        policy = self._branches.get(asked.branch)
        if self._outcome.done() or self._process.is_over:
            return
        if policy is None or asked.new in self._branches or len(self._branches) > MAX_BRANCHES:
            return self._process.fail("asked for a branch that cannot be")
        try:
            self._branches[asked.new] = policy.fork()
        except (ValueError, RlhfError) as error:
            self._process.fail(f"asked for a branch that cannot be: {error}")
