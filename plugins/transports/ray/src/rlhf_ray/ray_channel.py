"""`RayChannel`: what core's loop sees of the coordinator."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from rlhf_core.config import ResolvedRun
from rlhf_core.rollout import coordinator_from_tree, coordinator_to_tree, evaluation_metrics, with_groups
from rlhf_core.strategy import Strategy
from rlhf_core.types import MadeEpisode, PhaseTimes

from .calls import ask
from .messages import TakenEpisode
from .wire import pack_group, unpack_group


class RayChannel:
    """Episodes and evaluations; every rank fetches the episodes itself, rank 0 makes all other calls.

    It is an `ExperienceChannel` and an `Evaluator`.
    """

    def __init__(
        self,
        coordinator: Any,
        strategy: Strategy,
        resolved: ResolvedRun,
        *,
        timeout_seconds: float,
        metrics: Callable[[], Mapping[str, float]],
    ) -> None:
        """timeout_seconds: longest wait for an episode, or for an evaluation.
        metrics: further metrics to report with an episode (those of the sync before it).
        """
        self._coordinator = coordinator
        self._strategy = strategy
        self._options = resolved.run.eval
        self._timeout_seconds = timeout_seconds
        self._metrics = metrics

    def episode(self, index: int) -> MadeEpisode:
        """All groups of the episode. Raises `DeadlineError`, saying what is missing."""
        started = time.perf_counter()
        wait = self._timeout_seconds
        taken: TakenEpisode = ask(self._coordinator, "take", index, wait, wait_seconds=wait)
        waited = time.perf_counter() - started
        groups = [unpack_group(packed) for packed in taken.groups]
        metrics = {"transport/trainer_wait_s": waited, **taken.metrics, **self._metrics()}
        # Reported on one rank only, since throughput is summed over ranks.
        times = taken.times if self._strategy.is_main else PhaseTimes()
        return MadeEpisode(groups=groups, times=times, metrics=metrics)

    def published(self, version: int) -> None:
        """Do nothing: the sync has informed the coordinator."""

    def state_dict(self) -> dict[str, Any]:
        """The coordinator's state on rank 0, the only one that is saved."""
        if not self._strategy.is_main:
            return {}
        state = ask(self._coordinator, "state")
        return coordinator_to_tree(with_groups(state, unpack_group))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._strategy.is_main:
            ask(self._coordinator, "load", with_groups(coordinator_from_tree(state), pack_group))

    def evaluate(self) -> dict[str, float]:
        """Have the makers answer the held-out prompts (see `PolicyEvaluator.evaluate`). All ranks get the result."""
        metrics: dict[str, float] = {}

        def on_main() -> None:
            assert self._options is not None
            size, wait = self._options.batch_size, self._timeout_seconds
            num_prompts, rows = ask(self._coordinator, "evaluate", size, wait, wait_seconds=wait)
            metrics.update(evaluation_metrics(rows, num_prompts, self._options.score))

        self._strategy.run_on_main(on_main)
        shared: dict[str, float] = self._strategy.broadcast_object(metrics)
        return shared

    def close(self) -> None:
        """Do nothing: the driver ends the coordinator."""
