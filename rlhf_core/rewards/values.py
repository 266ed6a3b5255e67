"""Validates scores: one finite number per sample, from any numeric library."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Real

LARGEST = 3.4028234663852886e38
"""Largest finite float32: scores become float32 tensors, where anything beyond it would be infinite."""


class RewardFault(Exception):
    """One call of a reward failed; the text says how. `on_failure` turns it into scores, drops or a `RewardError`."""


@dataclass(frozen=True, slots=True)
class BadScore:
    """An invalid score that a reward returned for one sample."""

    reason: str


def read_scores(answer: object, count: int) -> list[float | BadScore]:
    """A reward's result for `count` samples as Python floats, invalid scores marked.

    Accepts any iterable of numbers, NumPy and torch scalars and one-dimensional arrays included; a bool is 0 or 1.
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


def _show(value: object) -> str:
    text = f"{value!r} ({type(value).__name__})" if value is not None else "None"
    return text if len(text) <= 120 else text[:117] + "..."
