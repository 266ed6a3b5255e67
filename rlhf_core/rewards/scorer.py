"""The rewards of a run, which are all called in the same way.

`RewardScorer` calls several rewards concurrently and outside the caller's thread, so that scoring overlaps generation.
`RewardCombiner` (the trainer's part) combines their scores.
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
"""One entry per sample: raw score by reward name, or None if a reward's failure policy drops the sample."""
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
    """Return the spec of a reward that a run selects. Builds the reward here unless it is isolated.

    Args:
        selected: The reward's plugin.
        config: Its validated options.
        context: Device, seed and model path for the build.
        call_options: Options of calls, adapted to the plugin's component.
        name: Name in metrics. By default the plugin's name, or the function's for `FILE.py:NAME`.
        weight: Factor in the combined score.
    """
    call_options = call_options.fitted_to(selected.component)
    return RewardSpec(
        name=name or selected.name.rpartition(":")[2] or selected.name,  # ./my_reward.py:brevity -> brevity
        weight=weight,
        call_options=call_options,
        function=None if call_options.isolate else selected.build(config, context),
        recipe=selected.recipe(config, context),
        plugin=f"{selected.distribution} {selected.version}",
    )


class RewardScorer:
    """Scores samples with every reward of a run, each with its own call options and failure policy.

    Example:
        with closing(RewardScorer([make_reward_spec(selected, config, context, call_options)])) as scorer:
            pending = scorer.submit(rollouts)  # scored in the background
            for rollout, rewards in zip(rollouts, pending.result()):
                print(rollout.sample_id, "dropped" if rewards is None else rewards)
    """

    def __init__(self, specs: Sequence[RewardSpec]) -> None:
        """Open the rewards. Raises `PluginError` if a caller that their options need is missing.

        Args:
            specs: May be empty if an environment provides the reward. Every sample is then kept.
        """
        self.weights = {spec.name: spec.weight for spec in specs}
        self._runners: list[RewardRunner] = []
        self._loop: LoopThread | None = None
        self._is_closed = False
        self._lock = Lock()
        with ExitStack() as stack:  # closes the opened rewards if a later one cannot be built
            for spec in specs:
                runner = RewardRunner(spec)
                stack.callback(runner.close)
                self._runners.append(runner)
            self._closing = stack.pop_all()

    def score(self, rollouts: Sequence[Rollout]) -> Scores:
        """Return raw scores by reward name, in the order of `rollouts`, None for a dropped sample.

        Raises `RewardError` if a reward with the failure policy `fail` failed.
        """
        return self.submit(rollouts).result()

    def submit(self, rollouts: Sequence[Rollout]) -> Future[Scores]:
        """Call `score` in the background. Thread-safe. Raises `RewardError` after `close`."""
        with self._lock:  # several makers of a process may start concurrently
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
        """Return the costs of each reward since the last call, as `reward_calls/<name>/<count>`.

        Counts of 0 are omitted, except `calls` and `seconds`.
        """
        metrics: dict[str, float] = {}
        for runner in self._runners:
            for key, value in runner.take_counts().items():
                if value or key in ("calls", "seconds"):
                    metrics[f"reward_calls/{runner.spec.name}/{key}"] = value
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return name -> state of the rewards in this process that keep one, without isolated rewards."""
        return state_of({runner.spec.name: runner.reward for runner in self._runners})

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        load_state_of({runner.spec.name: runner.reward for runner in self._runners}, states)

    def close(self) -> None:
        """Close rewards, threads, processes and the cache. Pending scores fail with `RewardError`."""
        with self._lock:
            self._is_closed = True
        self._closing.close()
