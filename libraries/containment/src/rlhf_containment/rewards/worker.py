"""The process of an isolated reward: `python -m rlhf_containment.rewards.worker SOCKET PARENT`.

The first request is a pickle of the function that builds the reward. Each later one is a pickle of rollouts.
"""

from __future__ import annotations

import asyncio
import pickle
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from rlhf_core.rewards.values import RewardFault, read_scores
from rlhf_core.util.error_text import error_text

from ..processes.asked import serve_requests
from .messages import failed, scored


class RewardWorker:
    """The reward and the event loop of its coroutines."""

    def __init__(self) -> None:
        self._reward: Callable[..., Any] | None = None
        self._loop = asyncio.new_event_loop()

    def answer(self, request: bytes) -> bytes:
        """Answer a request in the form of `rewards.messages`."""
        try:
            content = pickle.loads(request)  # noqa: S301 - from the run that started this process, over a socket pair
            if self._reward is None:
                return self._build(content)
            scores = self._reward(content)
            if isinstance(scores, Awaitable):
                scores = self._loop.run_until_complete(scores)
            return scored(read_scores(scores, len(content)))
        except RewardFault as fault:
            return failed(str(fault))
        except BaseException as error:  # third-party code may raise anything, KeyboardInterrupt included
            return failed(f"raised {error_text(error, caller='rlhf_containment')}")

    def _build(self, recipe: Callable[[], Callable[..., Any]]) -> bytes:
        try:
            self._reward = recipe()
        except Exception as error:  # reported to the parent, which names the plugin
            return failed(f"cannot be built: {type(error).__name__}: {error}")
        return scored([])


if __name__ == "__main__":
    serve_requests(int(sys.argv[1]), int(sys.argv[2]), RewardWorker().answer)
