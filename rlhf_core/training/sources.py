"""Batch sources of the loop: episodes of rollouts or of a dataset, cut into batches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from ..algorithm import DatasetAlgorithm
from ..environments.metrics import environment_metrics
from ..errors import RlhfError
from ..protocols import ExperienceChannel
from ..rollout.made import SamplesLost
from ..types import MadeEpisode
from .batches import BatchPlan, Rows, TrainBatch, rows_of_samples
from .estimates import EpisodeEstimates, Estimated
from .loop import EpisodeBatches

logger = logging.getLogger("rlhf")


class RolloutSource:
    """Episodes from a channel: scores combined, advantages added, batches in `sample_id` order."""

    def __init__(
        self,
        channel: ExperienceChannel,
        estimates: EpisodeEstimates,
        plan: BatchPlan,
        *,
        version: Callable[[], int],
        on_episode: Callable[[int, MadeEpisode, Estimated], None],
        texts: Callable[[int], Sequence[int]] = lambda num_rows: (),
    ) -> None:
        """`texts`: of so many rows, those whose rollouts `on_episode` wants on this rank."""
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
        metrics.update(environment_metrics(made.rows))
        metrics.update(made.metrics)
        self._on_episode(index, made, estimated)
        return EpisodeBatches(estimated.batches(version), metrics)

    def _estimated(self, index: int) -> tuple[MadeEpisode, Estimated]:
        while True:
            made = self._channel.episode(index)
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
    """Episodes of `prompts_per_episode` records, encoded by the algorithm, in the stream's seeded order."""

    def __init__(
        self,
        record: Callable[[int], Any],
        algorithm: DatasetAlgorithm[Any, Any],
        plan: BatchPlan,
        *,
        items_per_episode: int,
        encode: Callable[[Any], Any],
        prepare: Callable[[Sequence[Any]], Sequence[Any]],
        on_episode: Callable[[int, Sequence[Any]], None],
    ) -> None:
        self._record = record
        self._algorithm = algorithm
        self._plan = plan
        self._items_per_episode = items_per_episode
        self._encode = encode
        self._prepare = prepare
        self._on_episode = on_episode

    def episode(self, index: int) -> EpisodeBatches[TrainBatch]:
        start = index * self._items_per_episode
        encoded = [self._encode(self._record(start + i)) for i in range(self._items_per_episode)]
        items = [item for item in encoded if item is not None]
        if not items:
            raise RlhfError(
                f"all {len(encoded)} records of episode {index} are too long",
                where="prompts",
                hint="raise prompts.max_prompt_tokens, or shorten the records",
            )
        items = list(self._prepare(items))
        self._on_episode(index, items)
        metrics = {"data/skipped_fraction": 1 - len(items) / len(encoded)}
        samples = [(item,) for item in items]
        return EpisodeBatches(self._plan.batches(samples, self._algorithm.masked, None), metrics)
