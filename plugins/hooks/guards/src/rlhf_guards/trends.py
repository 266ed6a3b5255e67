"""Tests of a rising series, of a higher sample, and of a series that is lower than at its start."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import mul
from statistics import fmean, median

_MAX_CORRELATION = 0.95
_ASSUMED = 0.8
"""Autocorrelation in `lower_p_value`."""
_MIN_NOISE = 0.02
"""Standard deviation in `lower_p_value`, as a part of the largest value, of values without noise."""


def trend_p_value(values: Sequence[float]) -> float:
    """Return the one-sided p-value of a rising trend (Mann 1945, Kendall 1975).

    Successive episodes are correlated, which makes trends by chance more frequent. The variance is therefore multiplied
    by (1 + r) / (1 - r) (Yue and Wang 2004), where r is the lag-1 autocorrelation around the line of Theil and Sen.
    Since r is estimated, the result is compared with Student's t instead of the normal distribution. Its degrees of
    freedom are those of the number of independent values, `number * (1 - r) / (1 + r)`.

    Args:
        values: At least 3 values in order of time.

    Returns:
        A probability, 1 if all values are equal.

    Example:
        >>> trend_p_value(range(20)) < 1e-5
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
    t = (score - 1) / math.sqrt(variance * (1 + r) / (1 - r))
    return student_p_value(t, int(number * (1 - r) / (1 + r)) - 2)


def lower_p_value(first: Sequence[float], last: Sequence[float]) -> float:
    """Return the one-sided p-value of a lower mean in `last` than in `first`, by a t-test of correlated values.

    A fall may begin within `first`, so the noise is that around the line through each part. A few values do not show
    how far they are correlated, so an autocorrelation of 0.8 is assumed: the variance of a mean is 9 times that of
    independent values. The noise is at least 2% of the largest value, since values can be equal by chance.

    Args:
        first: At least 3 values in order of time.
        last: At least 3 later ones.

    Returns:
        A probability, 1 if all values are 0.

    Example:
        >>> lower_p_value([0.6, 0.5, 0.6, 0.5, 0.6], [0.0] * 10) < 1e-4
        True
    """
    m, n = len(first), len(last)
    variance = math.fsum(each * each for part in (first, last) for each in _around_line(part)) / (m + n - 4)
    least = _MIN_NOISE * max(map(abs, (*first, *last)))
    if least == 0.0:
        return 1.0
    error = math.sqrt(max(variance, least**2) * (1 / m + 1 / n) * (1 + _ASSUMED) / (1 - _ASSUMED))
    return student_p_value((fmean(first) - fmean(last)) / error, m + n - 4)


def _around_line(values: Sequence[float]) -> list[float]:
    """Distances from the line of least squares."""
    middle, mean = (len(values) - 1) / 2, fmean(values)
    steps = [index - middle for index in range(len(values))]
    slope = math.fsum(map(mul, steps, values)) / math.fsum(map(mul, steps, steps))
    return [value - mean - slope * step for step, value in zip(steps, values, strict=True)]


def student_p_value(t: float, degrees: int) -> float:
    """Return the probability of at least `t` under Student's distribution (Abramowitz and Stegun 1964, 26.7.3).

    Args:
        t: A value.
        degrees: Degrees of freedom. Less than 1 counts as 1.

    Example:
        >>> round(student_p_value(1.812, 10), 3)
        0.05
    """
    degrees = max(1, degrees)
    angle, is_odd = math.atan2(t, math.sqrt(degrees)), degrees % 2 == 1
    cosine, term, total = math.cos(angle), 1.0, 0.0
    for k in range(2 + is_odd, degrees + 1, 2):
        total += term
        term *= cosine**2 * (k - 1) / k
    total *= math.sin(angle)
    return max(0.0, 0.5 - ((angle + cosine * total) / math.pi if is_odd else total / 2))


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
