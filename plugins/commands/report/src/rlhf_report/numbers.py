"""Numbers and durations as a page shows them."""

from __future__ import annotations

from typing import Any

from .data import is_number

_NOTHING = 1e-7
"""Below the resolution of float32 next to 1: a KL of -6e-09 is shown as 0.

The same as `isNothing` of `sample_card.js` (rlhf-pages).
"""


def number(value: Any) -> str | None:
    """Three significant digits, thousands separated; None for a value that is not a number. Rounding errors are 0."""
    if not is_number(value):
        return None
    if abs(value) < _NOTHING:
        return "0"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def duration(seconds: Any) -> str | None:
    """`1 h 02 min`, `2 min 05 s` or `4.2 s`; None for a value that is not a number."""
    if not is_number(seconds):
        return None
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
