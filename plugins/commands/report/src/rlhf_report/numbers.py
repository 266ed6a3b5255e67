"""Formats numbers and durations for a page."""

from __future__ import annotations

from typing import Any

from .data import is_number

_ROUNDING = 1e-7
"""Resolution of float32 near 1. Smaller values are rounding errors: a KL of -6e-09 is shown as 0.

The same as in `isNothing` of `sample_card.js` (rlhf-pages).
"""


def number(value: Any) -> str | None:
    """Format a number with three significant digits and thousands separators. None if the value is not a number.

    Example:
        >>> number(12345.6), number(0.0123456), number(-6e-09)
        ('12,346', '0.0123', '0')
    """
    if not is_number(value):
        return None
    if abs(value) < _ROUNDING:
        return "0"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def duration(seconds: Any) -> str | None:
    """Format seconds. None if the value is not a number.

    Example:
        >>> duration(3720), duration(125), duration(4.2)
        ('1 h 02 min', '2 min 05 s', '4.2 s')
    """
    if not is_number(seconds):
        return None
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
