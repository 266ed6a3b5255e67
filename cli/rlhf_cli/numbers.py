"""Numbers formatted for readers: counts without decimals, other values without rounding noise."""

from __future__ import annotations

import re
from typing import Any

_COUNT = re.compile(r"(^|/)(num_\w+|calls|step|episode)$|_count$")
_SMALL = re.compile(r"(^|[/ _])lr$|_gap_|(^|/)time/")
"""Names of quantities that are usually small: 1e-06 is not rounded to 0."""
_SHOWN_AS_ZERO = 5e-5


def readable(value: Any, name: str = "") -> str:
    """Return the value as text, `-` for None.

    Args:
        value: A number, or any other value.
        name: The metric's name, which distinguishes counts (`eval/num_prompts`) and small quantities (`policy/lr`).

    Example:
        >>> readable(12.3456), readable(-6e-09), readable(1e-06, "policy/lr"), readable(200.0, "eval/num_prompts")
        ('12.346', '0.000', '1e-06', '200')
    """
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
