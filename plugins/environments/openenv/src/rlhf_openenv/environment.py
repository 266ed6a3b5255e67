"""`openenv`: one episode of an environment on an OpenEnv server."""

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
_TIMEOUT_SECONDS = 86_400.0
"""Timeout of the library, which is disabled this way: `environment.timeout_seconds` applies instead."""
_LEAVE_SECONDS = 1.0
_HINT = (
    "check that the server is running and allows environment.concurrency sessions at once, "
    "or set environment.on_failure: zero or drop"
)
_INVALID = re.compile(r"Server error: (.*) \(code: VALIDATION_ERROR\)", re.DOTALL)
logger = logging.getLogger("rlhf.openenv")


class OpenEnvEnvironment:
    """A session on the server, reset with the task's seed, which all samples of a prompt share."""

    def __init__(self, config: OpenEnvConfig, context: TaskContext) -> None:
        self.metrics = {"invalid_actions": 0.0}
        self._config = config
        self._client: Any = None
        self._connection: Any = None
        self._observation = ""

    async def reset(self, task: Any) -> str:
        """Connect and return the instructions followed by the first observation."""
        self._client = GenericEnvClient(
            self._config.base_url,
            connect_timeout_s=_TIMEOUT_SECONDS,
            message_timeout_s=_TIMEOUT_SECONDS,
            max_message_size_mb=MAX_MESSAGE_MEGABYTES,
            mode="simulation",
        )
        await self._wait("connecting", self._client.connect())
        self._connection = self._client._ws  # the library drops it if a call is canceled
        options = {**self._config.reset, "seed": task.seed}
        self._observation = self._text(await self._wait("resetting the environment", self._client.reset(**options)))
        return self._config.instructions + self._observation

    async def step(self, reply: Any) -> tuple[str | None, float, bool]:
        """Execute the action of a reply. Without a valid action, return an error and the last observation."""
        try:
            action = action_of(reply.text, self._config.action_field)
            result = await self._wait("making a step", self._client.step(action))
        except NoAction as problem:
            self.metrics["invalid_actions"] += 1
            return f"error: {problem}\n{self._observation}", self._config.invalid_reward, False
        if result.done:
            return None, result.reward or 0.0, True
        self._observation = self._text(result)
        return self._observation, result.reward or 0.0, False

    async def close(self) -> None:
        """Close the session with a short timeout, then abort the connection in any case."""
        if self._client is None:
            return
        try:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._client.close(), _LEAVE_SECONDS)
        finally:
            if self._connection is not None:
                self._connection.transport.abort()

    async def _wait(self, call: str, response: Coroutine[Any, Any, Any]) -> Any:
        """Await a call of the library. Raises `NoAction` for an invalid action, and otherwise `EpisodeError`."""
        try:
            return await response
        except asyncio.CancelledError:
            logger.warning("the session on the OpenEnv server was canceled while %s", call)
            raise
        except Exception as error:  # the library raises any error of its connection and of JSON
            if invalid := _INVALID.match(str(error)):
                raise NoAction(f"the environment does not take this action: {printable(invalid[1])[:500]}") from error
            raise EpisodeError(
                f"the OpenEnv server {self._config.base_url} failed while {call}: {printable(first_line(error))[:500]}",
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
                hint="select a field with environment.observation_field",
            ) from error
