"""Numbers as people read them: counts without decimals, and no tail of rounding errors."""

from __future__ import annotations

import re
from typing import Any

_COUNT = re.compile(r"(^|/)(num_\w+|calls|step|episode)$|_count$")
_SMALL = re.compile(r"(^|[/ _])lr$|_gap_|(^|/)time/")
"""Quantities that are small by nature: 1e-06 is said as it is."""
_SHOWN_AS_ZERO = 5e-5


def readable(value: Any, name: str = "") -> str:
    """`0.000` for -6e-09, `0.0004`, `12.346`, `200` for the count `eval/num_prompts`; `-` for None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "-" if value is None else str(value)
    if isinstance(value, int) or _COUNT.search(name):
        return f"{value:,.0f}"
    size = abs(value)
    if _SMALL.search(name):
        return f"{value:.3g}"
    if size < _SHOWN_AS_ZERO:
        return "0.000"
    if size < 0.001:
        return f"{value:.4f}"
    return f"{value:.3f}" if size < 1000 else f"{value:,.0f}"
