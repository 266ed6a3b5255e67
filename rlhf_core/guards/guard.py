"""Base of all guards: a guard finds a problem in an update's values and returns its action."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

from ..config.guards import Action
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
