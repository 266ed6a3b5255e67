"""The process an isolated reward runs in: `python -m rlhf_core.rewards.worker FD PARENT`.

It reads what to build from the connection, then answers batches of rollouts until the other side is gone. Its answers
are JSON: `["ready"]`, `["failed", why]`, `["scores", [...]]`; `read_answer` is for the other side. At `STACKS_SIGNAL`
it writes what it does to the connection, as text: for the other side, which then ends it.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import pickle
import sys
from collections.abc import Awaitable, Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from ..distributed.lock_watch import STACKS_SIGNAL
from ..distributed.parent_watch import killed_with_parent
from ..types import Rollout
from ..util.error_text import error_text
from .values import BadScore, RewardFault, TurnScores, read_scores

_MAX_REASON_CHARS = 10_000


def main(descriptor: int, parent: int) -> None:
    """Serve the connection behind `descriptor`. Ends when it closes or when the parent process is gone."""
    killed_with_parent(parent)
    faulthandler.register(STACKS_SIGNAL, file=descriptor, all_threads=False)  # in C: Python's lock may be held
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
    connection.send_bytes(b'["ready"]')
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
        return failed(f"raised {error_text(error)}")


class BadAnswer(ValueError):
    """The process sent something else; the message says why it is none of these."""


def failed(reason: str) -> bytes:
    """It could not be built, or the call failed."""
    return json.dumps(["failed", reason[:_MAX_REASON_CHARS]]).encode()


def scored(scores: Sequence[float | BadScore]) -> bytes:
    """A number for each sample, or why there is none."""
    return json.dumps(["scores", [_plain(each) for each in scores]]).encode()


def _plain(score: float | BadScore) -> Any:
    """A number, a text that says why there is none, or pairs of turns and numbers."""
    if isinstance(score, TurnScores):
        return list(score.turns.items())
    return score.reason if isinstance(score, BadScore) else score


def read_answer(data: bytes, count: int) -> tuple[str, Any]:
    """Kind and content of an answer about `count` samples. Raises `BadAnswer`."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadAnswer(f"it cannot be read as JSON ({type(error).__name__})") from None
    match found:
        case ["ready"]:
            return "ready", None
        case ["failed", str(reason)]:
            return "failed", reason
        case ["scores", list(values)]:
            return "scores", _scores(values, count)
    raise BadAnswer("it is JSON of another form")


def _scores(values: list[Any], count: int) -> list[float | BadScore]:
    try:
        given = [0.0 if isinstance(each, str) else dict(each) if isinstance(each, list) else each for each in values]
        numbers = read_scores(given, count)
    except (RewardFault, TypeError, ValueError) as fault:
        raise BadAnswer(str(fault)) from None
    return [BadScore(each) if isinstance(each, str) else number for each, number in zip(values, numbers, strict=True)]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
