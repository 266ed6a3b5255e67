"""`HeldOutEvaluation`: evaluates a run's policy on held-out prompts or records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..algorithm import Algorithm, DatasetAlgorithm
from ..hooks.relay import HookRelay
from ..place import Place
from .request import Evaluator
from .units import Units
from .updater import Updater


class HeldOutEvaluation:
    """Greedy answers under the rewards and, for a dataset, the loss on held-out records."""

    def __init__(
        self,
        algorithm: Algorithm[Any, Any],
        place: Place,
        updater: Updater,
        hooks: HookRelay,
        *,
        evaluator: Evaluator | None,
        items: Callable[[], Sequence[Any]],
    ) -> None:
        """`items`: the held-out records of a dataset, encoded and prepared; collective."""
        self._algorithm = algorithm
        self._place = place
        self._updater = updater
        self._hooks = hooks
        self._evaluator = evaluator
        self._items = items
        self.last_step: int | None = None
        """Updates made when the policy was evaluated last."""

    def evaluate(self, step: int) -> Mapping[str, float]:
        """`eval/…` after `step` updates. Collective."""
        with self._hooks.span("eval", step=step) as span:
            metrics = {} if self._evaluator is None else dict(self._evaluator.evaluate())
            if isinstance(self._algorithm, DatasetAlgorithm):
                metrics.update(self._losses(self._algorithm))
            span.set("metrics", metrics)
        self.last_step = step
        return metrics

    def _losses(self, algorithm: DatasetAlgorithm[Any, Any]) -> dict[str, float]:
        items = self._items()
        if not items:
            return {}
        units = Units(algorithm.units).places(items)[self._place.rank :: self._place.world_size]
        mine = [items[place] for unit in units for place in unit] or [algorithm.masked(items[0])]
        return {f"eval/{name}": value for name, value in self._updater.evaluate(mine).items()}
