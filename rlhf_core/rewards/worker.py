"""The process an isolated reward runs in: `python -m rlhf_core.rewards.worker FD PARENT`.

It reads what to build from the connection, then answers batches of rollouts until the other side is gone.
"""

from __future__ import annotations

import asyncio
import pickle
import sys
from collections.abc import Awaitable, Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from ..distributed.parent_watch import killed_with_parent
from ..types import Rollout
from .answers import failed, ready, scored
from .values import RewardFault, read_scores


def main(descriptor: int, parent: int) -> None:
    """Serve the connection behind `descriptor`. Ends when it closes or when the parent process is gone."""
    killed_with_parent(parent)
    connection = Connection(descriptor)
    loop = asyncio.new_event_loop()
    try:
        reward = _build(connection)
        while reward is not None:
            connection.send_bytes(_score(reward, connection.recv(), loop))
    except (EOFError, BrokenPipeError):
        return  # the run is over
    finally:
        loop.close()
        connection.close()


def _build(connection: Connection) -> Callable[..., Any] | None:
    try:
        recipe = connection.recv_bytes()
        reward = pickle.loads(recipe)()  # noqa: S301 - from the run that started this process, over a socket pair
    except EOFError:
        raise
    except Exception as error:  # told to the parent, which names the plugin
        connection.send_bytes(failed(f"cannot be built: {type(error).__name__}: {error}"))
        return None
    connection.send_bytes(ready())
    return reward  # type: ignore[no-any-return]


def _score(reward: Callable[..., Any], rollouts: Sequence[Rollout], loop: asyncio.AbstractEventLoop) -> bytes:
    try:
        answer = reward(rollouts)
        if isinstance(answer, Awaitable):
            answer = loop.run_until_complete(answer)
        return scored(read_scores(answer, len(rollouts)))
    except RewardFault as fault:
        return failed(str(fault))
    except BaseException as error:  # a stranger's function may raise anything, KeyboardInterrupt included
        return failed(f"raised {type(error).__name__}: {error}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
