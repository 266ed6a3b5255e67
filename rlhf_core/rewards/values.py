"""Validation of scores: one finite number per sample, from any numeric library."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Real

from ..types import Rollout

LARGEST = 3.4028234663852886e38
"""Maximum finite float32. Scores become float32 tensors, in which larger values would be infinite."""


class RewardFault(Exception):
    """A failed call of a reward, with the reason as text. `on_failure` converts it to scores, drops or an error."""


@dataclass(frozen=True, slots=True)
class BadScore:
    """An invalid score that a reward returned for one sample."""

    reason: str


class TurnScores(float):
    """A score earned in certain turns of the policy: the sum of their numbers."""

    turns: Mapping[int, float]
    """Index among the rollout's policy turns, from 0 -> number."""

    def __new__(cls, turns: Mapping[int, float]) -> TurnScores:
        score = super().__new__(cls, math.fsum(turns.values()))
        score.turns = dict(turns)
        return score

    def __reduce__(self) -> tuple[type[TurnScores], tuple[dict[int, float]]]:
        return TurnScores, (dict(self.turns),)


Outcome = float | BadScore | RewardFault
"""Result of a call for one answer: a score, an invalid score, or a failed call."""


def fits(score: Outcome, rollout: Rollout) -> Outcome:
    """Return the score of a rollout, or a `BadScore` if it is for a turn that the rollout lacks."""
    if not isinstance(score, TurnScores):
        return score
    num_turns = sum(turn.role == "policy" for turn in rollout.turns)
    beyond = [turn for turn in score.turns if not 0 <= turn < num_turns]
    return BadScore(f"a number for turn {beyond[0]}, counted from 0, of {num_turns}") if beyond else score


def read_scores(answer: object, count: int) -> list[float | BadScore]:
    """Return a reward's result for `count` samples as Python floats, with invalid scores as `BadScore`.

    Accepts any iterable of numbers, including NumPy and torch scalars and one-dimensional arrays. A bool is 0 or 1. A
    mapping of turns to numbers may replace a number (`TurnScores`). Raises `RewardFault` if the result is not a
    collection of `count` values.

    Example:
        >>> read_scores([1, True, float("nan"), {0: 0.5, 1: 0.25}], count=4)
        [1.0, 1.0, BadScore(reason='nan is not finite'), 0.75]
    """
    if isinstance(answer, str | bytes | Mapping) or not isinstance(answer, Iterable):
        raise RewardFault(f"returned {_show(answer)} instead of {count} numbers")
    tolist = getattr(answer, "tolist", None)
    values = tolist() if callable(tolist) else answer
    if not isinstance(values, Iterable):  # an array without dimensions
        raise RewardFault(f"returned the single value {_show(answer)} instead of {count} numbers")
    listed = list(values)
    if len(listed) != count:
        raise RewardFault(f"returned {len(listed)} values for {count} samples")
    return [_read(value) for value in listed]


def _read(value: object) -> float | BadScore:
    if isinstance(value, Mapping):
        return _read_turns(value)
    item = getattr(value, "item", None)
    if not isinstance(value, Real) and callable(item) and getattr(value, "ndim", None) == 0:
        value = item()
    if not isinstance(value, Real):
        return BadScore(f"{_show(value)} is not a number")
    try:
        number = float(value)
    except OverflowError:
        return BadScore(f"{_show(value)} is too large")
    if not math.isfinite(number):
        return BadScore(f"{number} is not finite")
    if abs(number) > LARGEST:
        return BadScore(f"{number} is too large for a 32-bit float")
    return number


def _read_turns(turns: Mapping[object, object]) -> float | BadScore:
    numbers: dict[int, float] = {}
    for turn, value in turns.items():
        if not isinstance(turn, int) or isinstance(turn, bool):
            return BadScore(f"{_show(turn)} is not the number of a turn")
        number = BadScore("a turn contains turns") if isinstance(value, Mapping) else _read(value)
        if isinstance(number, BadScore):
            return BadScore(f"turn {turn}: {number.reason}")
        numbers[turn] = number
    total = _read(math.fsum(numbers.values()))
    return total if isinstance(total, BadScore) else TurnScores(numbers)


def _show(value: object) -> str:
    text = f"{value!r} ({type(value).__name__})" if value is not None else "None"
    return text if len(text) <= 120 else text[:117] + "..."
