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
    """One plot: the metrics whose names match `keys` (in this order), without those that match `without`."""

    name: str
    title: str
    caption: str
    keys: Sequence[str]
    without: Sequence[str] = ()
    unit: str = ""
    log_scale: bool = False
    from_zero: bool = False
    """Whether the axis starts at zero: for counts, shares and sizes."""
    even_if_zero: bool = False
    """Whether it is drawn if every value is zero, too: that a reward is never given has to be seen."""
    scale: float = 1.0
    """Values are multiplied by it."""

    def select(self, present: Sequence[str]) -> list[str]:
        """The keys of this plot among a run's metrics."""
        chosen: dict[str, None] = {}
        for pattern in self.keys:
            chosen |= dict.fromkeys(key for key in present if fnmatch(key, pattern))
        return [key for key in chosen if not any(fnmatch(key, pattern) for pattern in self.without)]


@cache
def figures() -> Sequence[Figure]:
    """The table of plots."""
    table = (files(__package__) / "assets" / "figures.yaml").read_text(encoding="utf-8")
    return [Figure(**each) for each in yaml.safe_load(table)]
