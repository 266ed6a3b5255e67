"""Validates scores: one finite number per sample, from any numeric library."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Real

from ..types import Rollout

LARGEST = 3.4028234663852886e38
"""Largest finite float32: scores become float32 tensors, where anything beyond it would be infinite."""


class RewardFault(Exception):
    """One call of a reward failed; the text says how. `on_failure` turns it into scores, drops or a `RewardError`."""


@dataclass(frozen=True, slots=True)
class BadScore:
    """An invalid score that a reward returned for one sample."""

    reason: str


class TurnScores(float):
    """A score that was earned in certain turns of the policy: the sum of their numbers."""

    turns: Mapping[int, float]
    """Which of the rollout's policy turns, counted from 0 -> its number."""

    def __new__(cls, turns: Mapping[int, float]) -> TurnScores:
        made = super().__new__(cls, math.fsum(turns.values()))
        made.turns = dict(turns)
        return made

    def __reduce__(self) -> tuple[type[TurnScores], tuple[dict[int, float]]]:
        return TurnScores, (dict(self.turns),)


Outcome = float | BadScore | RewardFault
"""What a call found for one answer."""


def fits(score: Outcome, rollout: Rollout) -> Outcome:
    """The score of a rollout, or what is wrong with it."""
    if not isinstance(score, TurnScores):
        return score
    num_turns = sum(turn.role == "policy" for turn in rollout.turns)
    beyond = [turn for turn in score.turns if not 0 <= turn < num_turns]
    return BadScore(f"a number for turn {beyond[0]}, counted from 0, of {num_turns}") if beyond else score


def read_scores(answer: object, count: int) -> list[float | BadScore]:
    """A reward's result for `count` samples as Python floats, invalid scores marked.

    Accepts any iterable of numbers, NumPy and torch scalars and one-dimensional arrays included; a bool is 0 or 1. In
    place of a number may stand a mapping of turns to numbers (`TurnScores`).
    Raises `RewardFault` when it is not a collection of `count` values.
    """
    if isinstance(answer, str | bytes | Mapping) or not isinstance(answer, Iterable):
        raise RewardFault(f"returned {_show(answer)} in place of {count} numbers")
    tolist = getattr(answer, "tolist", None)
    values = tolist() if callable(tolist) else answer
    if not isinstance(values, Iterable):  # an array without dimensions
        raise RewardFault(f"returned the single value {_show(answer)} in place of {count} numbers")
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
        return BadScore(f"{_show(value)} is no number")
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
        number = BadScore("there are turns within a turn") if isinstance(value, Mapping) else _read(value)
        if isinstance(number, BadScore):
            return BadScore(f"turn {turn}: {number.reason}")
        numbers[turn] = number
    total = _read(math.fsum(numbers.values()))
    return total if isinstance(total, BadScore) else TurnScores(numbers)


def _show(value: object) -> str:
    text = f"{value!r} ({type(value).__name__})" if value is not None else "None"
    return text if len(text) <= 120 else text[:117] + "..."
