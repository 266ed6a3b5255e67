"""The numbers of a metrics line that a dashboard plots."""

from __future__ import annotations

from ..hookspecs import Metrics

_NOT_PLOTTED = frozenset({"step"})


def scalars(line: Metrics) -> dict[str, float]:
    """Name -> value of the numbers in a line; null (not finite) and structured values are left out."""
    return {
        name: float(value)
        for name, value in line.items()
        if name not in _NOT_PLOTTED and isinstance(value, int | float)
    }
