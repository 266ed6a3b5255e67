"""The checks of guards, which return a description of a problem in an update's values, or None."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from rlhf_core.errors import DivergenceError
from rlhf_core.hookspecs import Metrics, Moment

from .config import PlateauGuard

_WATCHED = ("loss/", "reward/")


def check_finite(moment: Moment) -> str | None:
    """Check whether a loss, a gradient norm or a reward is NaN or infinite."""
    if isinstance(moment.error, DivergenceError):
        return moment.error.message
    broken = [name for name, value in moment.metrics.items() if name.startswith(_WATCHED) and not math.isfinite(value)]
    return f"{', '.join(broken)} is not a finite number" if broken else None


def check_bound(metrics: Metrics, metric: str, bound: float, *, sign: int) -> str | None:
    """Check whether a metric is above its bound (sign 1) or below it (sign -1).

    Example:
        >>> check_bound({"kl/mean": 0.25}, "kl/mean", 0.1, sign=1)
        'kl/mean is 0.25, above 0.1'
        >>> check_bound({"policy/entropy": 0.5}, "policy/entropy", 0.1, sign=-1) is None
        True
    """
    value = metrics.get(metric)
    if value is None or sign * value <= sign * bound:
        return None
    side = f"above {bound:g}" if value > bound else f"below {bound:g}"
    return f"{metric} is {value:.4g}, {side}" if math.isfinite(value) else f"{metric} is {value}"


class Plateau:
    """Checks whether the mean reward of episodes has stopped rising."""

    _best: float | None
    _last_episode: int

    def __init__(self, options: PlateauGuard) -> None:
        self._options = options
        self.restart([])

    def problem(self, episode: int, metrics: Metrics) -> str | None:
        """Check the metrics of an update. Call it once per update, in order."""
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
        best, self._best, self._best_episode = self._best, reward, episode  # so that it waits that long again
        return f"reward/mean has not risen above {best:.4g} for {waited} episodes"

    def restart(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Reset at a start, a resume or a rollback, with the past `lines` of `metrics.jsonl`."""
        self._best, self._best_episode, self._last_episode = None, 0, -1
        for line in lines:
            self.problem(int(line["episode"]), line)
