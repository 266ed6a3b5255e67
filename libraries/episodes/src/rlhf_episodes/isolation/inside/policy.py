"""The policy as an environment sees it in a process of its own: turns and forks are messages to the run."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence

from ...contract import Endpoint, Messages, Options, Reply, Task, Tool
from ...episode import NO_FORK, OVER, remaining_tokens
from ..messages import Answer, EndpointAsked, ForkAsked, OfEpisode, Opening, TurnAsked, TurnLeft, error_as_told


class RemoteEpisode:
    """One episode: what its branches have in common (`Playable`)."""

    def __init__(self, number: int, task: Task, opening: Opening, tell: Callable[[OfEpisode], None]) -> None:
        """tell: sends a message as soon as nothing else is to be done."""
        self.number = number
        self.task = task
        self.opening = opening
        self.left = opening.left
        """See `Episode.left`."""
        self.num_asked = 0
        """Turns of the policy that were asked for and not refused."""
        self.tell = tell
        self.branches = itertools.count(1)
        self.was_refused = False
        """The run knows, and decides, what follows from a call at the endpoint that was refused."""
        self._turns = itertools.count()
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._has_endpoint = False
        self._is_over = False

    @property
    def num_turns(self) -> int:
        """Turns that may have been taken. At an endpoint nobody here sees them; the run looks again."""
        return self.opening.remaining_turns if self._has_endpoint else self.num_asked

    def policy(self) -> RemotePolicy:
        """The policy in the episode's first branch."""
        return RemotePolicy(self, 0, self.opening.room, can_fork=False)

    def check_open(self) -> None:
        """Raise `RuntimeError` once the episode is over."""
        if self._is_over:
            raise RuntimeError(OVER)

    def answered(self, turn: int, answer: Answer) -> None:
        """The run's answer to a turn that was asked for."""
        waiting = self._waiting.get(turn)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def close(self) -> None:
        """The episode is over, whether its environment knows or not."""
        self._is_over = True
        for waiting in self._waiting.values():
            waiting.cancel()

    async def ask(
        self, branch: int, messages: Messages, tools: Sequence[Tool], stop: Sequence[str], options: Options
    ) -> Answer:
        """Have the run sample a turn."""
        turn = next(self._turns)
        said = messages if messages is None or isinstance(messages, str) else [dict(each) for each in messages]
        self.tell(
            # Its parts are checked where they arrive.
            TurnAsked.model_construct(
                say="turn",
                episode=self.number,
                branch=branch,
                turn=turn,
                messages=said,
                tools=[dict(each) for each in tools],
                stop=list(stop),
                options=dict(options or {}),
            )
        )
        number = self.num_asked
        self.num_asked += 1
        try:
            return await self._answer(turn)
        except asyncio.CancelledError:
            if self.num_asked == number + 1:
                self.num_asked = number
            raise

    async def endpoint(self) -> Endpoint:
        """Have the run open an endpoint. What is asked there is not counted here: the run keeps the bounds."""
        self.check_open()
        turn = next(self._turns)
        self.tell(EndpointAsked(episode=self.number, turn=turn))
        answer = await self._answer(turn)
        if isinstance(answer.reply, Endpoint):
            self._has_endpoint = True
            return answer.reply
        raise error_as_told(answer.reply)

    async def _answer(self, turn: int) -> Answer:
        waiting: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[turn] = waiting
        try:
            return await waiting
        except asyncio.CancelledError:
            if not self._is_over:
                self.tell(TurnLeft(episode=self.number, turn=turn))
            raise
        finally:
            del self._waiting[turn]


class RemotePolicy:
    """The policy in one branch (`Policy`)."""

    def __init__(self, episode: RemoteEpisode, branch: int, room: int | None, *, can_fork: bool) -> None:
        self._episode = episode
        self._branch = branch
        self._room = room
        self._can_fork = can_fork

    @property
    def remaining_turns(self) -> int:
        return max(0, self._episode.opening.remaining_turns - self._episode.num_asked)

    @property
    def remaining_tokens(self) -> int:
        turns = self.remaining_turns * self._episode.opening.max_new_tokens
        return remaining_tokens(self._episode.left, self._room, turns)

    async def turn(
        self, messages: Messages = None, tools: Sequence[Tool] = (), stop: Sequence[str] = (), options: Options = None
    ) -> Reply:
        self._episode.check_open()
        could_fork, self._can_fork = self._can_fork, False
        try:
            answer = await self._episode.ask(self._branch, messages, tools, stop, options)
        except (TypeError, ValueError):  # what it was given cannot be sent
            self._can_fork = could_fork
            raise
        self._episode.left, self._room, self._can_fork = answer.left, answer.room, answer.can_fork
        if isinstance(answer.reply, Reply):
            return answer.reply
        self._episode.num_asked -= 1  # refused: it was not a turn
        raise error_as_told(answer.reply)

    async def endpoint(self) -> Endpoint:
        return await self._episode.endpoint()

    def fork(self) -> RemotePolicy:
        if not self._can_fork:
            raise ValueError(NO_FORK)
        new = next(self._episode.branches)
        self._episode.tell(ForkAsked(episode=self._episode.number, branch=self._branch, new=new))
        return RemotePolicy(self._episode, new, self._room, can_fork=True)
