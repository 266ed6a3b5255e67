"""One update: micro-batches, the loss over the global batch, backward, one optimizer step per trained role."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from ..algorithm import Algorithm, LossOutput, Mean
from ..batching import plan_micro_batches, to_device
from ..errors import DivergenceError, OutOfMemoryError
from ..models.forward_passes import applying, passes_of
from ..plugins.errors_of import errors_of, is_out_of_memory
from ..strategy import Strategy, TrainedModel
from ..types import Experience
from .batches import Units

if TYPE_CHECKING:
    from torch import Tensor

GAP_KEY = "rollout/logprob_gap_max"


class Updater:
    """Applies `Algorithm.loss` to this rank's part of a batch.

    The sums of all micro-batches of all ranks are divided by the counts of the whole update, so the gradient does not
    depend on how the batch is split over micro-batches and ranks.
    """

    def __init__(
        self,
        algorithm: Algorithm[Any, Any],
        strategy: Strategy,
        trained: Mapping[str, TrainedModel],
        *,
        micro_batch_tokens: int | None = None,
        micro_batch_size: int | None = None,
        plugin: str | None = None,
    ) -> None:
        """Create the updater of a trainer process.

        Args:
            algorithm: Provides the loss.
            strategy: Runs backward and the optimizer steps.
            trained: Role -> prepared model.
            micro_batch_tokens: Maximum price of a micro-batch, in tokens. None: a default for the device and models.
            micro_batch_size: Maximum number of items of a micro-batch. Overrides `micro_batch_tokens`.
            plugin: Label of the algorithm, for errors.
        """
        self._algorithm = algorithm
        self._strategy = strategy
        self._trained = trained
        self._models = {role: model.model for role, model in trained.items()}
        self._passes = passes_of(strategy)
        self._units = Units(algorithm.units, plugin=plugin)
        self._max_tokens, self._max_items = micro_batch_tokens, micro_batch_size
        self._plugin = plugin

    def update(self, items: Sequence[Any], *, gap_version: int | None = None) -> dict[str, float]:
        """Train on this rank's items and step. Collective.

        Args:
            items: At least one. May be a single masked filler.
            gap_version: Measure `rollout/logprob_gap_max` over samples of this policy version. Set it only for the
                first step of an episode, while the trainer's weights are those that sampled.

        Returns:
            The update's metrics. `<role>/lr` is the learning rate of this step. A role for which nothing counts on any
            rank is not stepped, nor is its schedule, and has `<role>/skipped` 1.
        """
        with _explained_memory():
            meter = self._run(items, gap_version, backward=True)
            self._check_finite(meter)
            rates = {role: float(trained.optimizer.param_groups[0]["lr"]) for role, trained in self._trained.items()}
            norms = {role: self._step(trained, role in meter.learning) for role, trained in self._trained.items()}
        metrics = meter.result()
        for role in self._trained:
            if role not in meter.learning:
                metrics[f"{role}/skipped"] = 1.0
            metrics[f"{role}/grad_norm"] = norms[role]
            metrics[f"{role}/lr"] = rates[role]
        return metrics

    def evaluate(self, items: Sequence[Any]) -> dict[str, float]:
        """Return the metrics of a loss on this rank's held-out `items`, without training. Collective."""
        import torch

        training = {role: model.training for role, model in self._models.items()}
        try:
            for model in self._models.values():
                model.eval()
            with torch.no_grad(), _explained_memory():
                return self._run(items, None, backward=False).result()
        finally:
            for role, model in self._models.items():
                model.train(training[role])

    def _run(self, items: Sequence[Any], gap_version: int | None, *, backward: bool) -> _Meter:
        """Run forward (and backward) on all micro-batches, in lockstep with the other ranks."""
        plans = self._units.micro_batches(items, self._plan)
        with errors_of(self._plugin, "collate"):
            batches = [self._algorithm.collate([items[i] for i in plan]) for plan in plans]
        counts, num_micro_batches = self._global_counts(batches)
        # Other roles are not stepped, since AdamW changes weights even at zero gradient.
        learning = frozenset(term.role for name, term in self._algorithm.terms.items() if counts[name] > 0)
        meter = _Meter(self._strategy, counts, learning)
        if backward and not meter.learning:
            return meter  # on every rank alike, since the counts are global
        filler = [self._algorithm.masked(items[0])]  # for a rank with fewer micro-batches than others
        for index in range(num_micro_batches):
            batch = batches[index] if index < len(batches) else self._algorithm.collate(filler)
            is_last = index == num_micro_batches - 1
            output = self._micro_step(batch, counts, is_last=is_last, backward=backward)
            if index < len(batches):
                self._measure(meter, output, batch, gap_version)
        return meter

    def _plan(self, units: Sequence[Sequence[Any]]) -> list[list[int]]:
        if self._max_items is None:
            return self._passes.plan(units, self._max_tokens, self._strategy, *self._models.values())
        return plan_micro_batches(units, self._max_items, lambda chosen: sum(map(len, chosen)))

    def _step(self, trained: TrainedModel, learns: bool) -> float:
        """Step if the role learns. Returns the gradient norm before clipping, or 0 without a step."""
        if learns:
            return self._strategy.step(trained)
        self._strategy.drop_gradients(trained)
        return 0.0

    def _global_counts(self, batches: Sequence[Any]) -> tuple[dict[str, float], int]:
        """Divisor of every term, summed over ranks, and the number of micro-batches, the maximum over ranks."""
        import torch

        terms = list(self._algorithm.terms)
        with errors_of(self._plugin, "counts"):
            local = [dict(self._algorithm.counts(batch)) for batch in batches]
        totals = torch.tensor([math.fsum(c.get(t, 0.0) for c in local) for t in terms], dtype=torch.float64)
        totals = self._strategy.all_reduce(totals)
        steps = self._strategy.all_reduce(torch.tensor([float(len(batches))], dtype=torch.float64), "max")
        return dict(zip(terms, totals.tolist(), strict=True)), int(steps.item())

    def _micro_step(self, batch: Any, counts: Mapping[str, float], *, is_last: bool, backward: bool) -> LossOutput:
        strategy = self._strategy
        with ExitStack() as stack:
            stack.enter_context(applying(self._passes, self._passes.applied(*self._models.values())))
            for model in self._models.values():
                stack.enter_context(strategy.accumulate(model, is_last))
            with strategy.autocast(), errors_of(self._plugin, "loss"):
                output = self._algorithm.loss(self._models, to_device(batch, strategy.device))
            for role, trained in self._trained.items() if backward else ():
                loss = self._objective(role, output, counts)
                if loss is not None:
                    strategy.backward(loss, trained.optimizer)
        return output

    def _objective(self, role: str, output: LossOutput, counts: Mapping[str, float]) -> Tensor | None:
        """The objective of `role`: its terms divided by their global counts, without the strategy's averaging."""
        factor = self._strategy.gradient_average_factor
        parts = [
            output.sums[name] * (term.coefficient * factor / max(counts[name], 1.0))
            for name, term in self._algorithm.terms.items()
            if term.role == role and name in output.sums
        ]
        return sum(parts[1:], parts[0]) if parts else None

    def _measure(self, meter: _Meter, output: LossOutput, batch: Any, gap_version: int | None) -> None:
        for name, total in output.sums.items():
            meter.add(f"loss/{name}", Mean(total.detach(), 0.0))
        for name, metric in output.metrics.items():
            meter.add(name, metric)
        if gap_version is not None and output.log_probs is not None and isinstance(batch, Experience):
            meter.gap = max(meter.gap, _log_prob_gap(output.log_probs, batch, gap_version))

    def _check_finite(self, meter: _Meter) -> None:
        """Raise `DivergenceError` on all ranks, before any of them steps, if a loss on any rank is not finite."""
        import torch

        bad = meter.first_not_finite()
        flag = torch.tensor([float(bad is not None)])
        if self._strategy.all_reduce(flag, "max").item() > 0:
            raise DivergenceError(
                f"{bad or 'a loss of another rank'} is not a finite number",
                where="update",
                hint="lower optimizer.lr (or optimizer.critic_lr), or raise optimizer.warmup_episodes",
            )


@contextmanager
def _explained_memory() -> Iterator[None]:
    """Convert an out-of-memory error to one that names the key to lower. Other errors pass unchanged."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(
            f"the update does not fit into memory ({str(error).splitlines()[0][:160]})",
            where="update",
            hint="lower train.micro_batch_tokens (the result stays the same), or set "
            "model.gradient_checkpointing: true",
        ) from error


def _log_prob_gap(log_probs: Tensor, batch: Experience, version: int) -> float:
    """Maximum |trainer - engine| log-prob difference over actions sampled by `version`, -inf without any."""
    current = (batch.policy_versions == version)[:, None] & batch.action_mask
    if not current.any():
        return -math.inf
    gap = (log_probs.cpu() - batch.action_log_probs.cpu()).abs()
    return float(gap.masked_fill(~current.cpu(), 0.0).max())


class _Meter:
    """Sums metrics over micro-batches and, once, over ranks."""

    def __init__(self, strategy: Strategy, counts: Mapping[str, float], learning: frozenset[str]) -> None:
        """Start with empty sums. `counts`: those of the loss terms, over the whole update."""
        self._strategy = strategy
        self._known = {f"loss/{name}": count for name, count in counts.items()}
        self.learning = learning
        """Roles for which something counts on any rank."""
        self._sums: dict[str, tuple[float, float]] = {}
        """Metric -> total and count."""
        self.gap = -math.inf
        """Maximum log-prob gap. -inf if it is not measured."""

    def add(self, name: str, metric: Mean) -> None:
        total, count = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = total + float(metric.total), count + float(metric.count)

    def first_not_finite(self) -> str | None:
        losses = {name: total for name, (total, _) in self._sums.items() if name.startswith("loss/")}
        return next((name for name, total in losses.items() if not math.isfinite(total)), None)

    def result(self) -> dict[str, float]:
        """Means, and the maximum gap, over all ranks. Means with zero count are omitted."""
        names = sorted(set().union(*self._strategy.all_gather_objects(list(self._sums))))
        if not names:
            return {}
        import torch

        sums = torch.tensor([self._sums.get(name, (0.0, 0.0)) for name in names], dtype=torch.float64)
        sums = self._strategy.all_reduce(sums)
        gap = float(self._strategy.all_reduce(torch.tensor([self.gap], dtype=torch.float64), "max"))
        totals = {
            name: (total, self._known.get(name, count))
            for name, (total, count) in zip(names, sums.tolist(), strict=True)
        }
        result = {name: total / count for name, (total, count) in totals.items() if count}
        return result if gap == -math.inf else {**result, GAP_KEY: gap}
