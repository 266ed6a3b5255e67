"""The guards of core: each finds a problem in an update's values and returns its action."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

from ..config.guards import Action
from ..errors import DivergenceError
from ..hookspecs import Metrics, Verdict, hookimpl

logger = logging.getLogger("rlhf")


class Guard(ABC):
    """A hook plugin that watches the updates of a run."""

    def __init__(self, name: str, action: Action, hint: str | None = None) -> None:
        """`hint`: what to change where the guard ends a run."""
        self.name = name
        self._action = action
        self._hint = hint
        self._warned_episode: int | None = None

    @abstractmethod
    def problem(self, episode: int, metrics: Metrics, error: BaseException | None) -> str | None:
        """Description of a problem, with its numbers, or None. Called once for each update, in order."""

    def restart(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Reset at the start of a fit, a resume or a rollback; `lines` of `metrics.jsonl` are its past."""

    @hookimpl
    def rlhf_verdict(self, step: int, episode: int, metrics: Metrics, error: BaseException | None) -> Verdict | None:
        problem = self.problem(episode, metrics, error)
        if problem is None:
            return None
        if self._action != "warn":
            return Verdict(action=self._action, guard=self.name, reason=problem, hint=self._hint)
        if self._warned_episode != episode:
            logger.warning("guard %s, update %d (episode %d): %s", self.name, step, episode + 1, problem)
            self._warned_episode = episode
        return None


class NonFinite(Guard):
    """A loss, a gradient norm or a reward is NaN or infinite."""

    _WATCHED = ("loss/", "reward/")

    def problem(self, episode: int, metrics: Metrics, error: BaseException | None) -> str | None:
        if isinstance(error, DivergenceError):
            return error.message
        watched = (name for name in metrics if name.startswith(self._WATCHED))
        broken = [name for name in watched if not math.isfinite(metrics[name])]
        return f"{', '.join(broken)} is not a finite number" if broken else None


class OutOfBound(Guard):
    """A metric is above a bound, or below one."""

    def __init__(
        self,
        name: str,
        action: Action,
        metric: str,
        *,
        high: float = math.inf,
        low: float = -math.inf,
        hint: str | None = None,
    ) -> None:
        super().__init__(name, action, hint)
        self._metric = metric
        self._low = low
        self._high = high

    def problem(self, episode: int, metrics: Metrics, error: BaseException | None) -> str | None:
        value = metrics.get(self._metric)
        if value is None or self._low <= value <= self._high:
            return None
        bound = f"above {self._high:g}" if value > self._high else f"below {self._low:g}"
        return f"{self._metric} is {value:.4g}, {bound}" if math.isfinite(value) else f"{self._metric} is {value}"


class Plateau(Guard):
    """The mean reward of episodes has stopped rising."""

    def __init__(self, name: str, action: Action, *, episodes: int, min_improvement: float) -> None:
        super().__init__(name, action)
        self._patience = episodes
        self._min_improvement = min_improvement
        self._best: float | None = None
        self._best_episode = 0
        self._last_episode: int | None = None

    def problem(self, episode: int, metrics: Metrics, error: BaseException | None) -> str | None:
        reward = metrics.get("reward/mean")
        if reward is None or episode == self._last_episode:
            return None
        self._last_episode = episode
        if self._best is None or reward > self._best + self._min_improvement:
            self._best, self._best_episode = reward, episode
            return None
        waited = episode - self._best_episode
        if waited < self._patience:
            return None
        best, self._best, self._best_episode = self._best, reward, episode  # triggers again only after as long
        return f"reward/mean has not risen above {best:.4g} for {waited} episodes"

    def restart(self, lines: Iterable[Mapping[str, Any]]) -> None:
        self._best, self._best_episode, self._last_episode = None, 0, None
        for line in lines:
            self.problem(int(line["episode"]), {k: v for k, v in line.items() if k == "reward/mean"}, None)
