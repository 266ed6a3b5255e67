"""One episode whose environment is in another process: its messages become what its policy is asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

from rlhf_core.errors import EpisodeError, RlhfError
from rlhf_core.util.redact import printable

from ..attempt import EnvironmentFault, EpisodeLost
from ..clock import Clock
from ..contract import Outcome, Policy, Task
from ..episode import EpisodePolicy
from .messages import (
    Answer,
    BadMessage,
    Doing,
    Ended,
    EndpointAsked,
    Failed,
    ForkAsked,
    OfEpisode,
    Opening,
    TurnAsked,
    TurnLeft,
    told_error,
)
from .process import EnvironmentProcess

MAX_BRANCHES = 10_000
"""An environment that forks more often has run wild."""


class IsolatedEpisode:
    """An environment in the form that core drives, which plays its episode in another process."""

    def __init__(
        self,
        process_for: Callable[[int], AbstractAsyncContextManager[EnvironmentProcess]],
        suspect: Callable[[int], None],
        clock: Clock,
    ) -> None:
        """process_for: gives the process for a sample. suspect: has a sample played by itself from now on."""
        self._process_for = process_for
        self._suspect = suspect
        self.clock = clock
        self._process: EnvironmentProcess
        self._number: int
        self._sample_id: int
        self._branches: dict[int, EpisodePolicy] = {}
        self._loop = asyncio.get_running_loop()
        self._outcome: asyncio.Future[Outcome] = self._loop.create_future()
        self._turns: dict[int, asyncio.Task[None]] = {}

    async def run(self, task: Task, policy: Policy) -> Outcome:
        """Have the environment run. The clock rests until there is a process.

        Raises `EnvironmentFault` or an `RlhfError` as its environment does, `EpisodeLost` where its process ended and
        it is to be made again.
        """
        assert isinstance(policy, EpisodePolicy)
        self.clock.stop()
        self._sample_id = task.sample_id
        self._branches[0] = policy
        async with self._process_for(task.sample_id) as self._process:
            return await self._play(task, policy)

    async def _play(self, task: Task, policy: EpisodePolicy) -> Outcome:
        if self._process.is_over:  # it ended while this one was on its way to it
            raise EpisodeLost
        self._number = self._process.add(self)
        opening = Opening(policy.remaining_turns, policy.max_new_tokens, policy.left, policy.room)
        try:
            self._process.send("play", self._number, task, opening)
        except Exception as error:  # pickling a stranger's metadata may raise anything
            self._process.episodes.pop(self._number)
            raise EpisodeError(
                f"its task cannot be sent to the environment's process: {error}",
                where=f"prompt {task.prompt.position}",
                hint="give plain values in the prompts' records, or say environment.isolate: false",
            ) from error
        self.clock.judge = self._judge
        self.clock.doing = "its constructor"
        self.clock.start()
        try:
            return await self._outcome
        finally:
            self._process.episodes.pop(self._number, None)
            for turn in self._turns.values():
                turn.cancel()

    async def _judge(self) -> bool:
        """Whether the deadline that passed is this episode's fault; if so, its process is ended.

        In a process that still answers, its call takes too long. In one that does not, any call that runs may hold
        Python's lock: each such episode is played again in its own process.
        """
        process = self._process
        is_alone = process.is_alone
        can_go_on = not is_alone and await process.can_go_on()
        if self._outcome.done() or process.is_over:
            return False
        if not (is_alone or can_go_on):
            process.fail("does not go on")
            return False
        self._suspect(self._sample_id)
        process.episodes.pop(self._number, None)  # its caller reports this fault
        process.end_without_suspects()
        return True

    def blame(self, what: str) -> None:
        """The process is gone, by the fault of this episode."""
        self._suspect(self._sample_id)
        self._end(EnvironmentFault(what))

    def lose(self, *, suspect: bool) -> None:
        """The process is gone; suspect: it may have been this episode's fault, or another's."""
        if suspect:
            self._suspect(self._sample_id)
        self._end(EpisodeLost())

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
            case TurnAsked():
                if message.turn in self._turns:
                    raise BadMessage("asked for one turn twice")
                # A task begins in the next turn of the loop; what follows waits for that, too, so all keep their order.
                self._turns[message.turn] = self._loop.create_task(self._turn(message))
            case EndpointAsked():
                self._turns.setdefault(message.turn, self._loop.create_task(self._endpoint(message)))
            case ForkAsked():
                self._loop.call_soon(self._fork, message)
            case TurnLeft():
                self._loop.call_soon(self._leave, message)
            case Ended():
                self._end(
                    Outcome(
                        reward=message.reward,
                        turn_rewards=dict(message.turn_rewards),
                        metrics=message.metrics,
                        status=message.status,
                        bad_tool_calls=message.bad_tool_calls,
                        columns=message.columns,
                    )
                )
            case Failed():
                error = message.error
                self._end(EnvironmentFault(printable(message.fault)) if error is None else error.error())

    async def _turn(self, asked: TurnAsked) -> None:
        policy = self._branches.get(asked.branch)
        if policy is None:
            self._turns.pop(asked.turn, None)
            return self._process.fail("asked for a turn in a branch that is not there")
        await self._answer(asked.turn, policy, policy.turn(asked.messages, asked.tools, asked.stop, asked.options))

    async def _endpoint(self, asked: EndpointAsked) -> None:
        policy = self._branches[0]
        await self._answer(asked.turn, policy, policy.endpoint())

    async def _answer(self, turn: int, policy: EpisodePolicy, asked: Awaitable[object]) -> None:
        """Send what comes of `asked`, a call of `policy`; nobody waits for it once the episode is over."""
        try:
            try:
                reply = await asked
            except Exception as error:  # what a policy raises is for its environment
                reply = told_error(error)
            if not (self._outcome.done() or self._process.is_over):
                answer = Answer(reply, policy.left, policy.room, policy.can_fork)
                self._process.send("answer", self._number, turn, answer)
        finally:
            self._turns.pop(turn, None)

    def _leave(self, left: TurnLeft) -> None:
        if (turn := self._turns.get(left.turn)) is not None:
            turn.cancel()

    def _fork(self, asked: ForkAsked) -> None:
        policy = self._branches.get(asked.branch)
        if self._outcome.done() or self._process.is_over:
            return
        if policy is None or asked.new in self._branches or len(self._branches) > MAX_BRANCHES:
            return self._process.fail("asked for a branch that cannot be")
        try:
            self._branches[asked.new] = policy.fork()
        except (ValueError, RlhfError) as error:
            self._process.fail(f"asked for a branch that cannot be: {error}")
