"""`openenv`: one episode of an environment that an OpenEnv server plays."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from rlhf_core.components import TaskContext
from rlhf_core.errors import EpisodeError
from rlhf_episodes import EpisodeTruncated, Outcome, Policy, Status, Task

from .config import OpenEnvConfig
from .session import Session
from .text import NoAction, action_of, text_of

logger = logging.getLogger(__name__)


class OpenEnvEnvironment:
    """A session of its own at the server, which begins with the task's seed: all samples of a prompt share it."""

    def __init__(self, config: OpenEnvConfig) -> None:
        self._config = config

    async def run(self, task: Task, policy: Policy) -> Outcome:
        """Turns and steps until the environment says that it is done, or a bound ends it."""
        session = Session(self._config.base_url)
        try:
            return await self._play(session, task, policy)
        except asyncio.CancelledError:
            if session.doing:
                logger.warning("sample %d: the OpenEnv server was left while %s", task.sample_id, session.doing)
            raise
        finally:
            await session.close()

    async def _play(self, session: Session, task: Task, policy: Policy) -> Outcome:
        await session.open()
        result = await session.reset({**self._config.reset, "seed": task.seed})
        shown = self._text(result)
        text = self._config.instructions + shown
        rewards: dict[int, float] = {}
        num_invalid = 0
        status: Status = "truncated"
        while True:
            try:
                reply = await policy.turn(text)
            except EpisodeTruncated:
                break
            try:
                result = await session.step(action_of(reply.text, self._config.action_field))
            except NoAction as wrong:
                num_invalid += 1
                rewards[reply.turn] = self._config.invalid_reward
                text = f"error: {wrong}\n{shown}"
            else:
                rewards[reply.turn] = result.reward or 0.0
                if result.done:
                    status = "done"
                    break
                text = shown = self._text(result)
            if policy.remaining_turns < 1:
                break
        return Outcome(turn_rewards=rewards, metrics={"invalid_actions": float(num_invalid)}, status=status)

    def _text(self, result: Any) -> str:
        try:
            return text_of(result.observation, self._config.observation_field)
        except ValueError as error:
            raise EpisodeError(
                f"the OpenEnv server {error}",
                where="environment",
                hint="environment.observation_field names what the policy is shown",
            ) from error


def build(config: OpenEnvConfig, context: TaskContext) -> OpenEnvEnvironment:
    """An environment for one episode."""
    return OpenEnvEnvironment(config)
