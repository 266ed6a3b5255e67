"""Batch sources of the loop: episodes of rollouts or of a dataset, cut into batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..algorithm import DatasetAlgorithm
from ..environments.metrics import environment_metrics
from ..errors import RlhfError
from ..protocols import ExperienceChannel
from ..types import BufferItem, MadeEpisode
from .batches import BatchPlan, Rows, TrainBatch, rows_of_samples
from .estimates import EpisodeEstimates
from .loop import EpisodeBatches


class RolloutSource:
    """Episodes from a channel: scores combined, advantages added, batches in `sample_id` order."""

    def __init__(
        self,
        channel: ExperienceChannel,
        estimates: EpisodeEstimates,
        plan: BatchPlan,
        *,
        version: Callable[[], int],
        on_episode: Callable[[int, MadeEpisode, Sequence[BufferItem]], None],
    ) -> None:
        self._channel = channel
        self._estimates = estimates
        self._plan = plan
        self._version = version
        self._on_episode = on_episode

    def episode(self, index: int) -> EpisodeBatches[TrainBatch]:
        made = self._channel.episode(index)
        items = sorted((item for group in made.groups for item in group.items), key=_place)
        if not items:
            raise RlhfError(
                f"episode {index} has no sample left: the reward policy dropped all of them",
                where="rewards",
                hint="see the rewards' failures in the log, or set on_failure: fail to stop at the first",
            )
        version = self._version()
        played = environment_metrics(items)
        estimated = self._estimates.of(items, self._plan)
        samples, metrics = rows_of_samples(estimated.items), estimated.metrics
        # Of the answers as they were sampled: an algorithm may mask tokens, and each rank has only its own rows' masks.
        metrics.update(_response_metrics(rows_of_samples(items), version))
        metrics.update(played)
        metrics.update(made.metrics)
        self._on_episode(index, made, estimated.items)
        return EpisodeBatches(self._plan.batches(samples, lambda _: estimated.filler, version), metrics)


def _place(item: BufferItem) -> tuple[int, int]:
    return item.sample_id, item.branch


def _response_metrics(samples: Sequence[Rows], version: int) -> dict[str, float]:
    """Lengths (sampled tokens), truncation and staleness of the samples."""
    staleness = [version - min(row.policy_version for row in rows) for rows in samples]
    lengths = [sum(row.num_sampled_tokens for row in rows) for rows in samples]
    return {
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
