"""What the process of an isolated reward answers: `["scores", […]]` or `["failed", REASON]`, as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rlhf_core.rewards.values import BadScore, RewardFault, TurnScores, read_scores

from ..processes.asked import BadAnswer

_MAX_REASON_CHARS = 10_000


def failed(reason: str) -> bytes:
    """The reward could not be built, or the call failed."""
    return json.dumps(["failed", reason[:_MAX_REASON_CHARS]]).encode()


def scored(scores: Sequence[float | BadScore]) -> bytes:
    """A number for each sample, or the reason why it has none."""
    return json.dumps(["scores", [_plain(each) for each in scores]]).encode()


def _plain(score: float | BadScore) -> Any:
    """A number, the reason for a missing one, or pairs of turns and numbers."""
    if isinstance(score, TurnScores):
        return list(score.turns.items())
    return score.reason if isinstance(score, BadScore) else score


def read_answer(data: bytes, count: int) -> list[float | BadScore]:
    """The scores of `count` samples. Raises `BadAnswer` for anything else, and `RewardFault` for a failed call."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadAnswer(f"wrote something that is not an answer: it is not JSON ({type(error).__name__})") from None
    match found:
        case ["failed", str(reason)]:
            raise RewardFault(reason)
        case ["scores", list(values)]:
            return _scores(values, count)
    raise BadAnswer("wrote something that is not an answer: it is JSON of another form")


def _scores(values: list[Any], count: int) -> list[float | BadScore]:
    try:
        given = [0.0 if isinstance(each, str) else dict(each) if isinstance(each, list) else each for each in values]
        numbers = read_scores(given, count)
    except (RewardFault, TypeError, ValueError) as fault:
        raise BadAnswer(f"wrote something that is not an answer: it {fault}") from None
    return [BadScore(each) if isinstance(each, str) else number for each, number in zip(values, numbers, strict=True)]
