"""JSON answers of an isolated reward's process: `["ready"]`, `["failed", why]`, `["scores", [...]]`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from .values import BadScore, RewardFault, read_scores

_MAX_REASON_CHARS = 10_000


class BadAnswer(ValueError):
    """The process sent something else; the message says why it is none of these."""


def ready() -> bytes:
    """The reward is built."""
    return json.dumps(["ready"]).encode()


def failed(reason: str) -> bytes:
    """It could not be built, or the call failed."""
    return json.dumps(["failed", reason[:_MAX_REASON_CHARS]]).encode()


def scored(scores: Sequence[float | BadScore]) -> bytes:
    """A number for each sample, or why there is none."""
    return json.dumps(["scores", [each.reason if isinstance(each, BadScore) else each for each in scores]]).encode()


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
        numbers = read_scores([0.0 if isinstance(each, str) else each for each in values], count)
    except RewardFault as fault:
        raise BadAnswer(str(fault)) from None
    return [BadScore(each) if isinstance(each, str) else number for each, number in zip(values, numbers, strict=True)]
