"""The reward `http`: sends samples to a server and receives scores, with retries while the server is unavailable."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from rlhf_core.components import RewardContext
from rlhf_core.protocols import Reward
from rlhf_core.types import Rollout
from rlhf_web import JsonClient, RemoteError, environment_key

from .config import HttpRewardConfig
from .protocol import ProtocolError, decode_response, encode_request

_AGAIN = (429, 502, 503, 504)
_FIRST_WAIT_SECONDS = 0.1


def build(config: HttpRewardConfig, context: RewardContext) -> Reward:
    """Return the reward. Raises `UserInputError` if the token's variable is not set."""
    token = None
    if config.token_env is not None:
        hint = f"export {config.token_env}=…, in the shell that starts the run"
        token = environment_key(config.token_env, where='reward "http": token_env', hint=hint)
    return HttpReward(config, token)


class HttpReward:
    """An async reward that reuses its connections."""

    def __init__(self, config: HttpRewardConfig, token: str | None) -> None:
        self._size = config.samples_per_request
        self._client = JsonClient(
            config.url,
            config,
            key=token,
            max_response_bytes=config.max_response_bytes,
            again=_AGAIN,
            first_wait_seconds=_FIRST_WAIT_SECONDS,
        )

    async def __call__(self, rollouts: Sequence[Rollout]) -> list[Any]:
        """Return the server's scores. Raises `RemoteError`, or `ProtocolError` if a sample cannot be sent."""
        parts = [rollouts[start : start + self._size] for start in range(0, len(rollouts), self._size)]
        tasks = [asyncio.ensure_future(self._score(part)) for part in parts]
        try:
            answers = await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # after a failure, the results of the others are not needed
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [score for answer in answers for score in answer]

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _score(self, rollouts: Sequence[Rollout]) -> list[Any]:
        content = await self._client.post(partial(encode_request, rollouts))
        try:
            return decode_response(content, len(rollouts))
        except ProtocolError as error:
            raise RemoteError(f"{self._client.shown}: its response is not valid: {error}") from None
