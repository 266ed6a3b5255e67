"""The rewards of a run: one policy for all of them, whoever wrote them.

`RewardScorer` asks several rewards about samples at the same time and off the caller's thread, so that scoring
overlaps generation. `RewardCombiner` (the trainer's part) makes one score of their answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from threading import Lock
from typing import Any

from pydantic import BaseModel

from ..components import RewardContext
from ..config.sections import RewardCallOptions
from ..errors import RewardError
from ..plugins.selected import SelectedPlugin
from ..types import Rollout
from ..util.kept_state import load_state_of, state_of
from .calling import RewardSpec
from .combiner import Combined, RewardCombiner
from .runner import RewardRunner
from .threads import LoopThread

__all__ = ["Combined", "RewardCombiner", "RewardScorer", "RewardSpec", "Scores", "make_reward_spec"]

Scores = list[dict[str, float] | None]
"""One entry a sample: raw score by reward name, or None where a reward's policy drops the sample."""
_STOPPED = "scoring was stopped: the run is ending"


def make_reward_spec(
    selected: SelectedPlugin,
    config: BaseModel,
    context: RewardContext,
    call_options: RewardCallOptions,
    *,
    name: str | None = None,
    weight: float = 1.0,
) -> RewardSpec:
    """The spec of a selected reward with its checked options; it is built here unless it is to be isolated."""
    call_options = call_options.fitted_to(selected.component)
    return RewardSpec(
        name=name or selected.name.rpartition(":")[2] or selected.name,  # ./my_reward.py:brevity is called brevity
        weight=weight,
        call_options=call_options,
        function=None if call_options.isolate else selected.build(config, context),
        recipe=selected.recipe(config, context),
        plugin=f"{selected.distribution} {selected.version}",
    )


class RewardScorer:
    """Asks every reward of a run about samples, each under its own policy."""

    def __init__(self, specs: Sequence[RewardSpec]) -> None:
        """specs: none where an environment gives the reward; every sample is then kept.

        Raises `PluginError` for an option without its caller.
        """
        self.weights = {spec.name: spec.weight for spec in specs}
        self._runners: list[RewardRunner] = []
        self._loop: LoopThread | None = None
        self._is_closed = False
        self._lock = Lock()
        with ExitStack() as stack:  # what was opened is closed again when a later reward cannot be built
            for spec in specs:
                runner = RewardRunner(spec)
                stack.callback(runner.close)
                self._runners.append(runner)
            self._closing = stack.pop_all()

    def score(self, rollouts: Sequence[Rollout]) -> Scores:
        """Raw scores by reward name, in the order of `rollouts`; None where a sample is dropped.

        Raises `RewardError` where a reward failed whose policy is `fail`.
        """
        return self.submit(rollouts).result()

    def submit(self, rollouts: Sequence[Rollout]) -> Future[Scores]:
        """`score`, in the background. From any thread. Raises `RewardError` after `close`."""
        with self._lock:  # several makers of a process start at once
            if self._is_closed:
                raise RewardError(_STOPPED, where="rewards")
            if self._loop is None:
                self._loop = LoopThread("rewards")
                self._closing.callback(self._loop.close)
            return self._loop.submit(self._score(list(rollouts)))

    async def _score(self, rollouts: Sequence[Rollout]) -> Scores:
        try:
            columns = await asyncio.gather(*(runner.score(rollouts) for runner in self._runners))
        except asyncio.CancelledError:
            raise RewardError(_STOPPED, where="rewards") from None
        scores: Scores = []
        for row in zip(*columns, strict=True) if columns else [()] * len(rollouts):
            kept = {name: value for name, value in zip(self.weights, row, strict=True) if value is not None}
            scores.append(kept if len(kept) == len(row) else None)
        return scores

    def take_metrics(self) -> dict[str, float]:
        """Take the costs of each reward since the last call, as `reward_calls/<name>/<count>`.

        Counts that are 0 are left out, except `calls` and `seconds`.
        """
        metrics: dict[str, float] = {}
        for runner in self._runners:
            for key, value in runner.take_counts().items():
                if value or key in ("calls", "seconds"):
                    metrics[f"reward_calls/{runner.spec.name}/{key}"] = value
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Name -> state of the rewards that keep one, in this process: not of those in processes of their own."""
        return state_of({runner.spec.name: runner.reward for runner in self._runners})

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Give the rewards back what `state_dict` gave."""
        load_state_of({runner.spec.name: runner.reward for runner in self._runners}, states)

    def close(self) -> None:
        """End threads, processes and the cache. Scores still waited for end with `RewardError`."""
        with self._lock:
            self._is_closed = True
        self._closing.close()
