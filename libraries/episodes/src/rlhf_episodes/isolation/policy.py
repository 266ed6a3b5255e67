"""The policy as an environment sees it in a process of its own: turns and forks are messages to the run."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..contract import Endpoint, Messages, Options, Reply, Tool
from ..episode import NO_FORK, OVER, State
from .messages import MAX_TEXT_CHARS, Answer, Play


class RemoteEpisode:
    """One episode: what its branches have in common, and who tells of its calls (`CallClock`)."""

    def __init__(self, play: Play, send: Callable[[Mapping[str, Any], bool], None]) -> None:
        """send: a message, at once or as soon as nothing else is to be done."""
        self.number = play.episode
        self.task = play.task
        self.state = play.state
        """Of the branch that was answered last: turns and tokens that are left are those of all branches."""
        self.doing = "run"
        self.branches = itertools.count(1)
        self._send = send
        self._turns = itertools.count()
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._is_over = False

    def policy(self) -> RemotePolicy:
        """The policy in the episode's first branch."""
        return RemotePolicy(self, 0, self.state)

    def start(self) -> None:
        """Tell the run, which keeps the deadlines, that a call begins: what comes next may hold up everything."""
        self.tell({"say": "doing", "call": self.doing[:MAX_TEXT_CHARS]}, at_once=True)

    def tell(self, message: Mapping[str, Any], *, at_once: bool = False) -> None:
        """Send a message, unless the episode is over."""
        if not self._is_over:
            self._send({**message, "episode": self.number}, at_once)

    def answered(self, answer: Answer) -> None:
        """The run's answer to a turn that was asked for."""
        waiting = self._waiting.get(answer.turn)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def close(self) -> None:
        """The episode is over, whether its environment knows or not."""
        self._is_over = True
        for waiting in self._waiting.values():
            waiting.cancel()

    async def ask(self, message: Mapping[str, Any]) -> Answer:
        """Have the run answer a message, which gets a number."""
        if self._is_over:
            raise RuntimeError(OVER)
        turn = next(self._turns)
        self.tell({**message, "turn": turn})
        waiting: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[turn] = waiting
        try:
            answer = await waiting
        except asyncio.CancelledError:
            self.tell({"say": "left", "turn": turn})
            raise
        finally:
            del self._waiting[turn]
        self.state = answer.state
        return answer


class RemotePolicy:
    """The policy in one branch (`Policy`)."""

    def __init__(self, episode: RemoteEpisode, branch: int, state: State) -> None:
        self._episode = episode
        self._branch = branch
        self._room = state.room
        self._can_fork = state.can_fork

    @property
    def remaining_turns(self) -> int:
        return self._episode.state.remaining_turns

    @property
    def remaining_tokens(self) -> int:
        return replace(self._episode.state, room=self._room).remaining_tokens

    async def turn(
        self, messages: Messages = None, tools: Sequence[Tool] = (), stop: Sequence[str] = (), options: Options = None
    ) -> Reply:
        said = messages if messages is None or isinstance(messages, str) else [dict(each) for each in messages]
        message = {
            "say": "turn",
            "branch": self._branch,
            "messages": said,
            "tools": [dict(each) for each in tools],
            "stop": list(stop),
            "options": dict(options or {}),
        }
        could_fork, self._can_fork = self._can_fork, False
        try:
            answer = await self._episode.ask(message)
        except (TypeError, ValueError):  # what it was given cannot be sent
            self._can_fork = could_fork
            raise
        self._room, self._can_fork = answer.state.room, answer.state.can_fork
        if isinstance(answer.reply, Reply):
            return answer.reply
        assert isinstance(answer.reply, Exception)
        raise answer.reply

    async def endpoint(self) -> Endpoint:
        """Have the run open an endpoint. What is asked there is not counted here: the run keeps the bounds."""
        answer = await self._episode.ask({"say": "endpoint"})
        if isinstance(answer.reply, Endpoint):
            return answer.reply
        assert isinstance(answer.reply, Exception)
        raise answer.reply

    def fork(self) -> RemotePolicy:
        if not self._can_fork:
            raise ValueError(NO_FORK)
        new = next(self._episode.branches)
        self._episode.tell({"say": "fork", "branch": self._branch, "new": new})
        return RemotePolicy(self._episode, new, replace(self._episode.state, room=self._room, can_fork=True))
