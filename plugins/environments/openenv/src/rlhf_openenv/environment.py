"""`openenv`: one episode of an environment that an OpenEnv server plays."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from openenv.core import GenericEnvClient

from rlhf_core.components import TaskContext
from rlhf_core.errors import EpisodeError, first_line
from rlhf_core.util import printable

from .config import OpenEnvConfig
from .text import NoAction, action_of, text_of

MAX_MESSAGE_MEGABYTES = 8.0
_PATIENCE_SECONDS = 86_400.0
"""Longest answer of the library's own: `environment.timeout_seconds` is what bounds it."""
_LEAVE_SECONDS = 1.0
_HINT = (
    "see that the server runs there and allows as many sessions at once as environment.concurrency; "
    "environment.on_failure: zero or drop leaves such episodes out"
)
_INVALID = re.compile(r"Server error: (.*) \(code: VALIDATION_ERROR\)", re.DOTALL)
logger = logging.getLogger("rlhf.openenv")


class OpenEnvEnvironment:
    """A session of its own at the server, which begins with the task's seed: all samples of a prompt share it."""

    def __init__(self, config: OpenEnvConfig, context: TaskContext) -> None:
        self.metrics = {"invalid_actions": 0.0}
        self._config = config
        self._client: Any = None
        self._shown = ""

    async def reset(self, task: Any) -> str:
        """Connect, and give the first observation after the instructions."""
        self._client = GenericEnvClient(
            self._config.base_url,
            connect_timeout_s=_PATIENCE_SECONDS,
            message_timeout_s=_PATIENCE_SECONDS,
            max_message_size_mb=MAX_MESSAGE_MEGABYTES,
            mode="simulation",
        )
        await self._wait("connecting", self._client.connect())
        options = {**self._config.reset, "seed": task.seed}
        self._shown = self._text(await self._wait("resetting the environment", self._client.reset(**options)))
        return self._config.instructions + self._shown

    async def step(self, reply: Any) -> tuple[str | None, float, bool]:
        """Make a reply's action; where it has none that the environment takes, say why."""
        try:
            action = action_of(reply.text, self._config.action_field)
            result = await self._wait("making a step", self._client.step(action))
        except NoAction as wrong:
            self.metrics["invalid_actions"] += 1
            return f"error: {wrong}\n{self._shown}", self._config.invalid_reward, False
        if result.done:
            return None, result.reward or 0.0, True
        self._shown = self._text(result)
        return self._shown, result.reward or 0.0, False

    async def close(self) -> None:
        """Say good-bye, within a moment, and let go of the connection however that goes."""
        if self._client is None:
            return
        connection = self._client._ws  # which the library forgets where its closing is cut
        try:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._client.close(), _LEAVE_SECONDS)
        finally:
            if connection is not None:
                connection.transport.abort()

    async def _wait(self, what: str, answer: Coroutine[Any, Any, Any]) -> Any:
        """The library's result. Raises `NoAction` for what is no action there, else `EpisodeError`."""
        try:
            return await answer
        except asyncio.CancelledError:
            logger.warning("the OpenEnv server was left while %s", what)
            raise
        except Exception as error:  # the library lets through what its connection and JSON raise
            if invalid := _INVALID.match(str(error)):
                raise NoAction(f"the environment does not take this action: {printable(invalid[1])[:500]}") from error
            raise EpisodeError(
                f"the OpenEnv server {self._config.base_url} failed while {what}: {printable(first_line(error))[:500]}",
                where="environment.base_url",
                hint=_HINT,
            ) from error

    def _text(self, result: Any) -> str:
        try:
            return text_of(result.observation, self._config.observation_field)
        except ValueError as error:
            raise EpisodeError(
                f"the OpenEnv server {error}",
                where="environment",
                hint="environment.observation_field names what the policy is shown",
            ) from error
