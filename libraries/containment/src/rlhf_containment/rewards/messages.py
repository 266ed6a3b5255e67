"""Answers of the process of an isolated reward, as JSON: `["scores", […]]` or `["failed", REASON]`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rlhf_core.rewards.values import BadScore, RewardFault, TurnScores, read_scores

from ..processes.asked import BadAnswer

_MAX_REASON_CHARS = 10_000


def failed(reason: str) -> bytes:
    """Encode the failure of a call, or of building the reward.

    Example:
        >>> failed("it crashed")
        b'["failed", "it crashed"]'
    """
    return json.dumps(["failed", reason[:_MAX_REASON_CHARS]]).encode()


def scored(scores: Sequence[float | BadScore]) -> bytes:
    """Encode one entry per sample: a number, or the reason for a missing one.

    Example:
        >>> scored([0.5, BadScore("not a number")])
        b'["scores", [0.5, "not a number"]]'
    """
    return json.dumps(["scores", [_to_json(each) for each in scores]]).encode()


def _to_json(score: float | BadScore) -> Any:
    """A number, the reason for a missing one, or pairs of turn and number."""
    if isinstance(score, TurnScores):
        return list(score.turns.items())
    return score.reason if isinstance(score, BadScore) else score


def read_answer(data: bytes, count: int) -> list[float | BadScore]:
    """Decode the scores of `count` samples.

    Raises `BadAnswer` if the data are not an answer, and `RewardFault` if the call failed.

    Example:
        >>> read_answer(b'["scores", [0.5]]', count=1)
        [0.5]
    """
    try:
        answer = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadAnswer(f"wrote something that is not an answer: it is not JSON ({type(error).__name__})") from None
    match answer:
        case ["failed", str(reason)]:
            raise RewardFault(reason)
        case ["scores", list(values)]:
            return _scores(values, count)
    raise BadAnswer("wrote something that is not an answer: the JSON has an unknown form")


def _scores(values: list[Any], count: int) -> list[float | BadScore]:
    try:
        scores = [0.0 if isinstance(each, str) else dict(each) if isinstance(each, list) else each for each in values]
        numbers = read_scores(scores, count)
    except (RewardFault, TypeError, ValueError) as fault:
        raise BadAnswer(f"wrote something that is not an answer: it {fault}") from None
    return [BadScore(each) if isinstance(each, str) else number for each, number in zip(values, numbers, strict=True)]
