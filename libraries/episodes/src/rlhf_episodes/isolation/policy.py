"""Proxy of the policy in the child process of isolated environments. Turns and forks are messages to the run."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from ..compaction import Compaction
from ..contract import Endpoint, Messages, Options, Reply, Tool
from ..episode import NO_FORK, OVER, State
from ..progress import Progress, Step
from .messages import MAX_TEXT_CHARS, StartEpisode, TurnResult
from .sendable import sendable


class RemoteEpisode:
    """One episode in the child: state shared by its branches, and reports of its calls to the run (`CallClock`)."""

    def __init__(self, start: StartEpisode, send: Callable[[Mapping[str, Any], bool], None]) -> None:
        """`send` takes a message and whether to send it at once, instead of when the event loop is idle."""
        self.number = start.episode
        self.task = start.task
        self.state = start.state
        """State of the branch with the latest result. Its remaining turns and tokens hold for all branches."""
        self.call_name = "run"
        self.branches = itertools.count(1)
        self._send = send
        self._turns = itertools.count()
        self._waiting: dict[int, asyncio.Future[TurnResult]] = {}
        self._is_over = False
        self.progress = Progress(start.steps, self._record_step if start.is_recorded else None)

    def _record_step(self, step: Step) -> None:
        if not isinstance(step.observation, str | None):
            step = replace(step, observation=sendable(step.observation))
        self.send({"type": "step", **asdict(step)})

    def policy(self) -> RemotePolicy:
        """Return the policy in the episode's first branch."""
        return RemotePolicy(self, 0, self.state)

    def start(self) -> None:
        """Report at once to the run, which keeps the deadlines, that a call starts. The call may block this process."""
        self.send({"type": "call-started", "call": self.call_name[:MAX_TEXT_CHARS]}, at_once=True)

    def send(self, message: Mapping[str, Any], *, at_once: bool = False) -> None:
        """Send a message, unless the episode is over."""
        if not self._is_over:
            self._send({**message, "episode": self.number}, at_once)

    def set_result(self, result: TurnResult) -> None:
        """Deliver the run's result of a turn."""
        waiting = self._waiting.get(result.turn)
        if waiting is not None and not waiting.done():
            waiting.set_result(result)

    def close(self) -> None:
        """End the episode and cancel pending turns."""
        self._is_over = True
        for waiting in self._waiting.values():
            waiting.cancel()

    async def request(self, message: Mapping[str, Any]) -> TurnResult:
        """Send a numbered request to the run and return its result."""
        if self._is_over:
            raise RuntimeError(OVER)
        turn = next(self._turns)
        self.send({**message, "turn": turn})
        waiting: asyncio.Future[TurnResult] = asyncio.get_running_loop().create_future()
        self._waiting[turn] = waiting
        try:
            result = await waiting
        except asyncio.CancelledError:
            self.send({"type": "turn-canceled", "turn": turn})
            raise
        finally:
            del self._waiting[turn]
        self.state = result.state
        return result


class RemotePolicy:
    """The policy in one branch (`Policy`)."""

    def __init__(self, episode: RemoteEpisode, branch: int, state: State) -> None:
        self._episode = episode
        self._branch = branch
        self._context_left = state.context_left
        self._can_fork = state.can_fork

    @property
    def remaining_turns(self) -> int:
        return self._episode.state.remaining_turns

    @property
    def remaining_tokens(self) -> int:
        return replace(self._episode.state, context_left=self._context_left).remaining_tokens

    @property
    def sees_images(self) -> bool:
        return self._episode.state.sees_images

    async def turn(
        self,
        messages: Messages = None,
        tools: Sequence[Tool] = (),
        stop: Sequence[str] = (),
        options: Options = None,
        compaction: Compaction = None,
    ) -> Reply:
        message = {
            "type": "turn",
            "branch": self._branch,
            "messages": messages if isinstance(messages, str | None) else sendable(messages),
            "tools": [dict(each) for each in tools],
            "stop": list(stop),
            "options": dict(options or {}),
            "compaction": compaction,
        }
        could_fork, self._can_fork = self._can_fork, False
        try:
            result = await self._episode.request(message)
        except (TypeError, ValueError):  # the message cannot be sent
            self._can_fork = could_fork
            raise
        self._context_left, self._can_fork = result.state.context_left, result.state.can_fork
        if isinstance(result.reply, Reply):
            return result.reply
        assert isinstance(result.reply, Exception)
        raise result.reply

    async def endpoint(self) -> Endpoint:
        """Have the run open an endpoint. The run enforces the limits on its calls, which are not counted here."""
        result = await self._episode.request({"type": "endpoint"})
        if isinstance(result.reply, Endpoint):
            return result.reply
        assert isinstance(result.reply, Exception)
        raise result.reply

    def fork(self) -> RemotePolicy:
        if not self._can_fork:
            raise ValueError(NO_FORK)
        new = next(self._episode.branches)
        self._episode.send({"type": "fork", "branch": self._branch, "new": new})
        state = replace(self._episode.state, context_left=self._context_left, can_fork=True)
        return RemotePolicy(self._episode, new, state)
