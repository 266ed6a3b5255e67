"""What guards find: a problem in an update's values, told with its numbers, or None."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from rlhf_core.errors import DivergenceError
from rlhf_core.hookspecs import Metrics, Moment

from .config import PlateauGuard

_WATCHED = ("loss/", "reward/")


def not_finite(moment: Moment) -> str | None:
    """A loss, a gradient norm or a reward is NaN or infinite."""
    if isinstance(moment.error, DivergenceError):
        return moment.error.message
    broken = [name for name, value in moment.metrics.items() if name.startswith(_WATCHED) and not math.isfinite(value)]
    return f"{', '.join(broken)} is not a finite number" if broken else None


def beyond(metrics: Metrics, metric: str, bound: float, *, sign: int) -> str | None:
    """A metric is above its bound (sign 1) or below it (-1)."""
    value = metrics.get(metric)
    if value is None or sign * value <= sign * bound:
        return None
    side = f"above {bound:g}" if value > bound else f"below {bound:g}"
    return f"{metric} is {value:.4g}, {side}" if math.isfinite(value) else f"{metric} is {value}"


class Plateau:
    """The mean reward of episodes has stopped rising."""

    _best: float | None
    _last_episode: int

    def __init__(self, options: PlateauGuard) -> None:
        self._options = options
        self.restart([])

    def problem(self, episode: int, metrics: Metrics) -> str | None:
        """Called once for each update, in order."""
        reward = metrics.get("reward/mean")
        if reward is None or episode == self._last_episode or self._options.episodes is None:
            return None
        self._last_episode = episode
        if self._best is None or reward > self._best + self._options.min_improvement:
            self._best, self._best_episode = reward, episode
            return None
        waited = episode - self._best_episode
        if waited < self._options.episodes:
            return None
        best, self._best, self._best_episode = self._best, reward, episode  # triggers again only after as long
        return f"reward/mean has not risen above {best:.4g} for {waited} episodes"

    def restart(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """At a start, a resume or a rollback; `lines` of `metrics.jsonl` are its past."""
        self._best, self._best_episode, self._last_episode = None, 0, -1
        for line in lines:
            self.problem(int(line["episode"]), line)
