"""Scores finished episodes with the rewards of their environments while later ones are played."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future

from rlhf_core.rewards.scorer import Scores
from rlhf_core.rollout.row import Played
from rlhf_core.rollout.samples import rollout_of
from rlhf_core.types import PhaseTimes

from .playable import Playable

SCORED_TOGETHER = 64
"""Number of episodes of an environment that are sent to its rewards at once."""


class Scoring:
    """The episodes of one call of `play` whose environment has its own rewards."""

    def __init__(self, times: PhaseTimes) -> None:
        """Start without episodes. `times`: receives the time spent waiting for rewards."""
        self._times = times
        self._waiting: dict[str | None, tuple[Playable, list[Played]]] = {}
        self._submitted: list[tuple[Playable, list[Played], Future[Scores]]] = []

    def add(self, played: Played, environment: Playable) -> None:
        """Add an episode with rows to those that are scored.

        Args:
            played: The episode.
            environment: The environment that it was played in.
        """
        _, waiting = self._waiting.setdefault(environment.label, (environment, []))
        waiting.append(played)
        if len(waiting) >= SCORED_TOGETHER:
            self._submit(*self._waiting.pop(environment.label))

    def results(self) -> Iterator[Played]:
        """Yield all episodes with their whole reward. Dropped ones are without rows."""
        for environment, waiting in self._waiting.values():
            self._submit(environment, waiting)
        self._waiting.clear()
        for environment, episodes, scores in self._submitted:
            started = time.perf_counter()
            found = scores.result()
            self._times.reward_s += time.perf_counter() - started
            assert environment.rewards is not None and environment.label is not None
            for played, each in zip(episodes, found, strict=True):
                yield environment.rewards.add(played, each, environment.label, environment.weight)

    def _submit(self, environment: Playable, episodes: list[Played]) -> None:
        assert environment.rewards is not None
        scores = environment.rewards.submit([rollout_of(each.rows[-1], each) for each in episodes])
        self._submitted.append((environment, episodes, scores))
