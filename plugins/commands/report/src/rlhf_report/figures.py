"""The plots of a report and their metrics, from the table `assets/figures.yaml`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from importlib.resources import files

import yaml


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A plot of the metrics whose names match `keys` (in this order) and do not match `without`."""

    name: str
    title: str
    caption: str
    keys: Sequence[str]
    without: Sequence[str] = ()
    unit: str = ""
    log_scale: bool = False
    from_zero: bool = False
    """Whether the axis starts at zero, for counts, shares and sizes."""
    even_if_zero: bool = False
    """Whether to draw the plot even if every value is zero, for metrics such as a reward that is never earned."""
    scale: float = 1.0
    """Factor that values are multiplied by."""

    def select(self, metrics: Sequence[str]) -> list[str]:
        """Return the names of this plot's metrics among a run's metrics.

        Example:
            >>> figure = Figure(name="loss", title="", caption="", keys=["loss/*"], without=["loss/*_std"])
            >>> figure.select(["loss/value", "loss/policy", "loss/value_std", "kl/mean"])
            ['loss/value', 'loss/policy']
        """
        selected: dict[str, None] = {}
        for pattern in self.keys:
            selected |= dict.fromkeys(key for key in metrics if fnmatch(key, pattern))
        return [key for key in selected if not any(fnmatch(key, pattern) for pattern in self.without)]


@cache
def figures() -> Sequence[Figure]:
    """Return the table of plots."""
    table = (files(__package__) / "assets" / "figures.yaml").read_text(encoding="utf-8")
    return [Figure(**each) for each in yaml.safe_load(table)]
