"""Tests of a rising series, and of a higher sample, by ranks and the normal approximation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median

_MAX_CORRELATION = 0.95


def trend_p_value(values: Sequence[float]) -> float:
    """Return the one-sided p-value of a rising trend (Mann 1945, Kendall 1975).

    Successive episodes are correlated, which makes trends by chance more frequent. The variance is therefore multiplied
    by (1 + r) / (1 - r) (Yue and Wang 2004), where r is the lag-1 autocorrelation around the line of Theil and Sen.

    Args:
        values: At least 3 values in order of time.

    Returns:
        A probability, 1 if all values are equal.

    Example:
        >>> trend_p_value(range(20)) < 1e-6
        True
    """
    number = len(values)
    pairs = [(i, j) for i in range(number) for j in range(i + 1, number)]
    score = sum((values[j] > values[i]) - (values[j] < values[i]) for i, j in pairs)
    variance = (number * (number - 1) * (2 * number + 5) - _of_ties(values, lambda t: t * (t - 1) * (2 * t + 5))) / 18
    if variance <= 0:
        return 1.0
    slope = median((values[j] - values[i]) / (j - i) for i, j in pairs)
    r = lag_1_autocorrelation([value - slope * i for i, value in enumerate(values)])
    return _above(score, variance * (1 + r) / (1 - r))


def lag_1_autocorrelation(values: Sequence[float]) -> float:
    """Return the lag-1 autocorrelation, corrected for its bias in short series (Kendall 1954), in [0, 0.95].

    Args:
        values: At least 5 values, or fewer for a result of 0.

    Example:
        >>> lag_1_autocorrelation([1, -1] * 10)
        0.0
    """
    number = len(values)
    if number < 5:
        return 0.0
    mean = math.fsum(values) / number
    apart = [value - mean for value in values]
    total = math.fsum(each * each for each in apart)
    scale = max(abs(value) for value in values)
    if total <= (1e-9 * scale) ** 2 * number:  # a line, up to rounding
        return 0.0
    r = math.fsum(one * other for one, other in pairwise(apart)) / total
    return min(max((number * r + 1) / (number - 4), 0.0), _MAX_CORRELATION)


def higher_p_value(first: Sequence[float], last: Sequence[float]) -> float:
    """Return the one-sided p-value of higher values in `last` than in `first` (Mann and Whitney 1947).

    Args:
        first: Values, at least one.
        last: Values, at least one.

    Returns:
        A probability, 1 if all values are equal.

    Example:
        >>> higher_p_value([1, 2, 3, 4, 5], [6, 7, 8, 9, 10]) < 0.01
        True
    """
    m, n = len(first), len(last)
    wins = sum((later > earlier) - (later < earlier) for earlier in first for later in last)  # 2 U - m n
    ties = _of_ties([*first, *last], lambda t: t**3 - t)
    variance = m * n / 3 * ((m + n + 1) - ties / ((m + n) * (m + n - 1)))
    return _above(wins, variance) if variance > 0 else 1.0


def _of_ties(values: Sequence[float], of: Callable[[int], int]) -> int:
    """Sum a function of the number of equal values, over distinct values."""
    return sum(of(number) for number in Counter(values).values())


def _above(score: float, variance: float) -> float:
    """Return the probability of at least this score, with a continuity correction of 1."""
    return 0.5 * math.erfc((score - 1) / math.sqrt(2 * variance))
