"""Where the batches of an episode come from: rollouts or a dataset."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ..algorithm import DatasetAlgorithm
from ..errors import RlhfError
from ..rollout.episode_metrics import ENVIRONMENT, environment_metrics
from ..rollout.samples import SamplesLost
from ..types import MadeEpisode, Role
from ..wiring.parts import TrainerParts
from .batches import BatchPlan, Rows, TrainBatch, Units, rows_of_samples
from .estimates import EpisodeEstimates, Estimated
from .loop import EpisodeBatches

if TYPE_CHECKING:
    from torch import Tensor, nn

logger = logging.getLogger("rlhf")


class RolloutSource:
    """Episodes from a channel: scores combined, advantages added, batches in `sample_id` order."""

    def __init__(
        self,
        channel: Callable[[int], MadeEpisode],
        estimates: EpisodeEstimates,
        plan: BatchPlan,
        *,
        version: Callable[[], int],
        on_episode: Callable[[int, MadeEpisode, Estimated], None],
        texts: Callable[[int], Sequence[int]] = lambda num_rows: (),
    ) -> None:
        """channel: makes an episode. texts: of so many rows, those whose rollouts `on_episode` wants on this rank."""
        self._channel = channel
        self._estimates = estimates
        self._plan = plan
        self._version = version
        self._texts = texts
        self._on_episode = on_episode

    def episode(self, index: int) -> EpisodeBatches[TrainBatch]:
        made, estimated = self._estimated(index)
        version = self._version()
        metrics = estimated.metrics
        # Of the answers as they were sampled: an algorithm may mask tokens of rows that other ranks have.
        metrics.update(_response_metrics(rows_of_samples(made.rows), version))
        metrics.update(environment_metrics([row.columns.get(ENVIRONMENT, {}) for row in made.rows]))
        metrics.update(made.metrics)
        self._on_episode(index, made, estimated)
        return EpisodeBatches(estimated.batches(version), metrics)

    def _estimated(self, index: int) -> tuple[MadeEpisode, Estimated]:
        while True:
            made = self._channel(index)
            if not made.rows:
                raise RlhfError(
                    f"episode {index} has no sample left: the reward policy dropped all of them",
                    where="rewards",
                    hint="see the rewards' failures in the log, or set on_failure: fail to stop at the first",
                )
            try:
                return made, self._estimates.of(made, self._plan, self._texts(len(made.rows)))
            except SamplesLost as lost:
                logger.warning("%s", lost)


def _response_metrics(samples: Sequence[Rows], version: int) -> dict[str, float]:
    """Lengths (sampled tokens), truncation and staleness of the samples."""
    staleness = [version - min(row.policy_version for row in rows) for rows in samples]
    lengths = [sum(row.num_sampled_tokens for row in rows) for rows in samples]
    mixed = sum(any(row.mixed for row in rows) for rows in samples)
    return {
        **({"staleness/mixed_fraction": mixed / len(samples)} if mixed else {}),
        "response/length_mean": sum(lengths) / len(samples),
        "response/length_max": float(max(lengths)),
        "response/truncated_fraction": sum(rows[-1].truncated for rows in samples) / len(samples),
        "staleness/mean": sum(staleness) / len(samples),
        "staleness/max": float(max(staleness)),
    }


class DatasetSource:
    """Episodes of `prompts_per_episode` records in the stream's seeded order, with a reference where one is needed."""

    def __init__(self, run: TrainerParts, algorithm: DatasetAlgorithm[Any, Any], plan: BatchPlan) -> None:
        """Loads the reference."""
        self._algorithm = algorithm
        self._tokenizer = run.inputs.tokenizer
        self._prompts = run.inputs.prompts
        self._plan = plan
        self._place = run.place
        options = run.resolved.run
        self._items_per_episode = options.train.prompts_per_episode
        self._eval_prompts = run.inputs.eval_prompts[None] if run.resolved.measures_eval_records else None
        self._num_held_out = options.eval.num_prompts if options.eval is not None else 0
        self._models = run.pass_models

    def held_out(self) -> list[Any]:
        """This rank's part of the items to evaluate on, without those too long; empty if there are none. Collective."""
        own = self._eval_prompts
        lines = self._prompts.evaluation_records() if own is None else own.evaluation_records(self._num_held_out)
        items = self._prepared(lines)
        units = Units(self._algorithm.units).places(items)[self._place.rank :: self._place.world_size]
        mine = [items[place] for unit in units for place in unit]
        return mine or [self._algorithm.masked(item) for item in items[:1]]

    def episode(self, index: int) -> tuple[Sequence[Any], EpisodeBatches[TrainBatch]]:
        """The items of an episode, and their batches."""
        start = index * self._items_per_episode
        lines = [self._prompts.record(start + i) for i in range(self._items_per_episode)]
        items = self._prepared(lines)
        if not items:
            raise RlhfError(
                f"all {len(lines)} records of episode {index} are too long",
                where="prompts",
                hint="raise prompts.max_prompt_tokens, or shorten the records",
            )
        ask_policy, ask_reference = partial(self._ask, "policy"), partial(self._ask, "reference")
        self._algorithm.start_episode(items, policy=ask_policy, reference=ask_reference)
        metrics = {"data/skipped_fraction": 1 - len(items) / len(lines)}
        samples = [(item,) for item in items]
        return items, EpisodeBatches(self._plan.batches(samples, self._algorithm.masked, None), metrics)

    def _prepared(self, lines: Sequence[Any]) -> list[Any]:
        encoded = [self._algorithm.encode(line, self._tokenizer) for line in lines]
        items = [item for item in encoded if item is not None]
        return list(self._algorithm.prepare_items(items, partial(self._ask, "reference"))) if items else []

    def _ask(self, role: Role, items: Sequence[Any]) -> list[Tensor]:
        """`reference_forward` of one of the run's models over items that every rank has."""
        algorithm = self._algorithm

        def forward(model: nn.Module, some: Sequence[Any]) -> Tensor:
            batch = algorithm.to_device(algorithm.collate(some), self._models.place.device)
            return algorithm.reference_forward(model, batch)

        return self._models.rows(role, items, forward, empty=algorithm.masked(items[0]), shared=True) if items else []
