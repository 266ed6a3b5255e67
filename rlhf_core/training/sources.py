"""Batch sources of the loop: episodes of rollouts or of a dataset, split into each rank's part of every batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import Any

from ..algorithm import DatasetAlgorithm, RolloutAlgorithm
from ..batching import collate, split
from ..environments.metrics import ENVIRONMENT, environment_metrics
from ..errors import RlhfError
from ..protocols import ExperienceChannel
from ..rewards.scorer import RewardCombiner
from ..types import BufferItem, MadeEpisode
from .loop import EpisodeBatches


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """This rank's part of one global training batch; at least one item, which may be a masked filler."""

    items: Sequence[Any]
    gap_version: int | None = None
    """Policy version of the trainer's weights; set only on an episode's first batch, before they change."""


Rows = Sequence[Any]
"""Items that must be in the same update: the rows of an episode that branched, or a sample's one item."""


def rows_of_samples(items: Sequence[BufferItem]) -> list[Rows]:
    """The items sorted by `sample_id` and `branch` and grouped into samples."""
    return [list(rows) for _, rows in groupby(items, key=lambda item: item.sample_id)]


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """How an episode is split: global sizes, and this rank."""

    train_batch_size: int
    epochs_per_episode: int
    rank: int
    world_size: int

    def batches(
        self, samples: Sequence[Rows], masked: Callable[[Any], Any], gap_version: int | None
    ) -> Iterator[Iterator[TrainBatch]]:
        """Epochs of batches, in the order of `samples`; the last batch of a pass may be smaller."""
        for epoch in range(self.epochs_per_episode):
            yield self._pass(samples, masked, gap_version if epoch == 0 else None)

    def _pass(
        self, samples: Sequence[Rows], masked: Callable[[Any], Any], gap_version: int | None
    ) -> Iterator[TrainBatch]:
        for start in range(0, len(samples), self.train_batch_size):
            yield self.batch(
                samples[start : start + self.train_batch_size], masked, gap_version if start == 0 else None
            )

    def batch(self, part: Sequence[Rows], masked: Callable[[Any], Any], gap_version: int | None) -> TrainBatch:
        """This rank's rows of the global batch `part`; a masked filler where it has none."""
        mine = list(chain.from_iterable(part[self.rank :: self.world_size]))
        return TrainBatch(mine or [masked(part[0][0])], gap_version)


class RolloutSource:
    """Episodes from a channel: scores combined, advantages over the whole episode, batches in `sample_id` order."""

    def __init__(
        self,
        channel: ExperienceChannel,
        algorithm: RolloutAlgorithm,
        combiner: RewardCombiner,
        plan: BatchPlan,
        *,
        version: Callable[[], int],
        complete: Callable[[list[BufferItem]], list[BufferItem]],
        on_episode: Callable[[int, MadeEpisode, Sequence[BufferItem]], None],
    ) -> None:
        """`complete` adds values of the trainer's own models to the samples, before advantages are computed."""
        self._channel = channel
        self._algorithm = algorithm
        self._combiner = combiner
        self._plan = plan
        self._version = version
        self._complete = complete
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
        items, metrics = self._with_advantages(self._complete(items))
        samples = rows_of_samples(items)
        metrics.update(_response_metrics(samples, version))
        metrics.update(played)
        metrics.update(made.metrics)
        self._on_episode(index, made, items)
        return EpisodeBatches(self._plan.batches(samples, self._algorithm.masked, version), metrics)

    def _with_advantages(self, items: Sequence[BufferItem]) -> tuple[list[BufferItem], dict[str, float]]:
        import torch

        raw = {
            name: torch.tensor([item.rewards[name] for item in items], dtype=torch.float32) for name in items[0].rewards
        }
        counted = [items[0].sample_id - 1, *(item.sample_id for item in items[:-1])]
        first = torch.tensor([item.sample_id != before for item, before in zip(items, counted, strict=True)])
        combined = self._combiner.combine(raw, counts=first)
        episode = replace(collate(items), scores=combined.scores)
        if episode.turn_rewards is not None:
            weight = self._combiner.weights[ENVIRONMENT]
            episode = replace(episode, turn_rewards=weight * episode.turn_rewards)
        output = self._algorithm.advantages(episode)
        return split(output.experience), {**combined.metrics, **output.metrics}


def _place(item: BufferItem) -> tuple[int, int]:
    return item.sample_id, item.branch


def _response_metrics(samples: Sequence[Sequence[BufferItem]], version: int) -> dict[str, float]:
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
