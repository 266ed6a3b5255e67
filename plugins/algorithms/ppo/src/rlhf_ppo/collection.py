"""Batch source of `PPOTrainer`'s loop: collect steps fill a buffer, update steps iterate over it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from rlhf_core.batching import collate, split
from rlhf_core.rollout import made_episode
from rlhf_core.strategy import Strategy
from rlhf_core.training import BatchPlan, EpisodeBatches, RolloutSource, TrainBatch
from rlhf_core.types import BufferItem, Experience, MadeEpisode, PhaseTimes
from rlhf_core.util import permutation

logger = logging.getLogger("rlhf")


class SampleBuffer:
    """`PPOTrainer.data_buffer`: this process's samples of the current episode, newest last.

    During collection they have raw rewards only; when training starts they get advantages, and the samples of all
    processes are redistributed.
    """

    def __init__(self, sample_batch_size: int, limit: int, *, seed: int) -> None:
        """limit: most samples kept, oldest dropped first; 0 or less means no limit. seed: seed of `sample`."""
        self.items: list[BufferItem] = []
        self.limit = limit
        self._sample_batch_size = sample_batch_size
        self._seed = seed
        self._num_drawn = 0

    def __len__(self) -> int:
        return len(self.items)

    def append(self, experience: Experience) -> None:
        """Add a batch's samples; over the limit the oldest are dropped, with a warning."""
        self.items += split(experience)
        num_dropped = len(self.items) - self.limit if self.limit > 0 else 0
        if num_dropped > 0:
            logger.warning(
                "buffer_limit is %d samples: the %d oldest of %d are dropped, untrained",
                self.limit,
                num_dropped,
                len(self.items),
            )
            del self.items[:num_dropped]

    def sample(self) -> Experience:
        """A batch of samples drawn at random, at most `train_batch_size` of them."""
        self._num_drawn += 1
        order = permutation(len(self.items), self._seed, "data-buffer", self._num_drawn)
        return collate([self.items[index] for index in order[: self._sample_batch_size]])

    def clear(self) -> None:
        """Forget all samples."""
        self.items.clear()


class CollectedEpisodes:
    """An `ExperienceChannel`: every rank collects from its own prompts, then all ranks exchange their samples."""

    def __init__(
        self,
        collect: Callable[[int], Experience],
        buffer: SampleBuffer,
        *,
        num_collect_steps: int,
        take_times: Callable[[], PhaseTimes],
        strategy: Strategy,
    ) -> None:
        self._collect = collect
        self._buffer = buffer
        self._num_collect_steps = num_collect_steps
        self._take_times = take_times
        self._strategy = strategy

    def episode(self, index: int) -> MadeEpisode:
        """Collect an episode."""
        self._buffer.clear()
        for step in range(self._num_collect_steps):
            self._buffer.append(self._collect(step))
        items = [item for part in self._strategy.all_gather_objects(self._buffer.items) for item in part]
        return made_episode(items, self._take_times())

    def published(self, version: int) -> None:
        """Do nothing: the next episode is collected when the loop asks for it."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing: no state is kept between episodes."""

    def close(self) -> None:
        """Do nothing: no resource is held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomBatches(BatchPlan):
    """`sample_buffer`: an update step draws one batch from the buffer instead of going over all of it."""

    seed: int

    def passes(self, samples: Sequence[Sequence[Any]]) -> Iterator[list[Sequence[int]]]:
        for step in range(self.epochs_per_episode):
            # Sample ids are unique in a run, so the first one identifies the episode.
            order = permutation(len(samples), self.seed, "sample-buffer", samples[0][0].sample_id, step)
            yield [order[: self.train_batch_size]]


class ExperienceSource:
    """Wraps core's `RolloutSource`: yields batches as `Experience`, as the seed's steps and callbacks expect."""

    def __init__(
        self, source: RolloutSource, *, accumulation_steps: int, num_passes: int, device: torch.device | None
    ) -> None:
        """accumulation_steps: batches per optimizer step, counted across an episode's passes; its last may have fewer.

        device: device that holds the episode's samples until they are used; None is the CPU.
        """
        self._source = source
        self._accumulation_steps = accumulation_steps
        self._num_passes = num_passes
        self._device = device
        self._num_batches = 0
        self.gap_version: int | None = None
        """Policy version to measure the last batch's log-prob gap against; None but on an episode's first batch."""
        self.ends_episode = False
        """Whether the batch yielded last is the episode's last."""

    @property
    def completes_update(self) -> bool:
        """Whether the optimizers step after the batch yielded last."""
        return self.ends_episode or self._num_batches % self._accumulation_steps == 0

    def episode(self, index: int) -> EpisodeBatches[Experience]:
        made = self._source.episode(index)
        self._num_batches, placed = 0, dict[tuple[int, int], BufferItem]()
        epochs = (self._pass(list(batches), number, placed) for number, batches in enumerate(made.epochs, start=1))
        return EpisodeBatches(epochs, made.metrics)

    def _pass(
        self, batches: Sequence[TrainBatch], number: int, placed: dict[tuple[int, int], BufferItem]
    ) -> Iterator[Experience]:
        for batch in batches:
            self._num_batches += 1
            self.gap_version = batch.gap_version
            self.ends_episode = number == self._num_passes and batch is batches[-1]
            yield collate([self._place(item, placed) for item in batch.items])

    def _place(self, item: BufferItem, placed: dict[tuple[int, int], BufferItem]) -> BufferItem:
        """The item on the buffer's device, moved there once in an episode."""
        if self._device is None:
            return item
        if not bool(item.action_mask.any()):
            return to_device(item, self._device)  # a masked copy that shares its sample's id
        place = item.sample_id, item.branch
        if place not in placed:
            placed[place] = to_device(item, self._device)
        return placed[place]


def to_device(item: BufferItem, device: torch.device) -> BufferItem:
    """The same sample with its tensors on `device`."""
    moved: dict[str, Any] = {}
    for field in fields(item):
        value = getattr(item, field.name)
        if isinstance(value, torch.Tensor):
            moved[field.name] = value.to(device)
    return replace(item, **moved)
