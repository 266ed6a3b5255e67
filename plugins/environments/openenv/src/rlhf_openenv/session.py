"""A session with an OpenEnv server: an environment of its own there, over one connection."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from openenv.core import GenericEnvClient

from rlhf_core.errors import EpisodeError, first_line
from rlhf_core.util import printable

from .text import NoAction

MAX_MESSAGE_MEGABYTES = 8.0
_PATIENCE_SECONDS = 86_400.0
"""Longest answer of the library's own: `environment.timeout_seconds` is what bounds it."""
_LEAVE_SECONDS = 1.0
_HINT = (
    "see that the server runs there and allows as many sessions at once as environment.concurrency; "
    "environment.on_failure: zero or drop leaves such episodes out"
)
_INVALID = re.compile(r"Server error: (.*) \(code: VALIDATION_ERROR\)", re.DOTALL)


class Session:
    """Opened, asked one thing after another, and closed; all by one episode."""

    def __init__(self, base_url: str) -> None:
        self.doing = ""
        """The call in progress, in words; empty where there is none."""
        self._base_url = base_url
        self._client = GenericEnvClient(
            base_url,
            connect_timeout_s=_PATIENCE_SECONDS,
            message_timeout_s=_PATIENCE_SECONDS,
            max_message_size_mb=MAX_MESSAGE_MEGABYTES,
            mode="simulation",
        )

    async def open(self) -> None:
        """Connect. Raises `EpisodeError`."""
        await self._wait("connecting", self._client.connect())

    async def reset(self, options: dict[str, Any]) -> Any:
        """The library's result. Raises `EpisodeError`."""
        return await self._wait("resetting the environment", self._client.reset(**options))

    async def step(self, action: dict[str, Any]) -> Any:
        """The library's result. Raises `NoAction` for what is no action there, else `EpisodeError`."""
        return await self._wait("making a step", self._client.step(action))

    async def close(self) -> None:
        """Say good-bye, within a moment, and let go of the connection however that goes."""
        connection = self._client._ws  # which the library forgets where its closing is cut
        try:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._client.close(), _LEAVE_SECONDS)
        finally:
            if connection is not None:
                connection.transport.abort()

    async def _wait(self, what: str, answer: Coroutine[Any, Any, Any]) -> Any:
        self.doing = what
        try:
            found = await answer
        except Exception as error:  # the library lets through what its connection and JSON raise
            self.doing = ""
            if invalid := _INVALID.match(str(error)):
                raise NoAction(f"the environment does not take this action: {printable(invalid[1])[:500]}") from error
            raise EpisodeError(
                f"the OpenEnv server {self._base_url} failed while {what}: {printable(first_line(error))[:500]}",
                where="environment.base_url",
                hint=_HINT,
            ) from error
        self.doing = ""
        return found
