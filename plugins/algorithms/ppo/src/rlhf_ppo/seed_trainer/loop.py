"""Core's loop for `PPOTrainer`, and the source of its batches: collect steps fill a buffer, update steps pass over it.

Each pass and each step calls the trainer's own methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import torch

from rlhf_core.batching import collate
from rlhf_core.hooks import HookRelay
from rlhf_core.rollout import made_episode
from rlhf_core.strategy import Strategy
from rlhf_core.training import BatchPlan, EpisodeBatches, EpisodeRecord, RolloutSource, TrainBatch, Trainer
from rlhf_core.types import BufferItem, Experience, MadeEpisode, PhaseTimes
from rlhf_core.util import permutation

from .base import SampleBuffer


class CollectedEpisodes:
    """Every rank collects from its own prompts, then all ranks exchange their samples."""

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
    columns = item.columns.map(lambda value, kind: value if kind.per == "metrics" else value.to(device))
    return replace(item, columns=columns, **moved)


class LoopOwner(Protocol):
    """The methods of `PPOTrainer` that its loop calls."""

    num_train_step: int
    _version: int

    def _learn(self, update_step: int) -> None: ...

    def _training_step(self, experience: Experience) -> None: ...

    def _after_update(self, episode: int) -> None: ...

    def _finish_episode(self, episode: int, record: EpisodeRecord) -> Mapping[str, float]: ...


class TrainerLoop(Trainer[Experience]):
    """Calls the trainer's `_learn` for each pass and its `_training_step` for each batch.

    Only a batch that completes an update fires the hooks `rlhf_update_…` and enters the metrics.
    """

    def __init__(self, owner: LoopOwner, source: ExperienceSource, hooks: HookRelay, record: EpisodeRecord) -> None:
        super().__init__(hooks, owner.num_train_step)
        self._owner = owner
        self._record = record
        self._batches = source
        self._pass: tuple[Iterable[Experience], int, int] = ((), 0, 0)
        self.metrics: Mapping[str, float] = {}
        """Metrics of the last step; kept here because the seed's `_training_step` returns nothing."""

    def batches(self, episode: int) -> EpisodeBatches[Experience]:
        return self._batches.episode(episode)

    def learn(self, batches: Iterable[Experience], episode: int, epoch: int) -> None:
        self._pass = (batches, episode, epoch)
        self._owner._learn(epoch)

    def learn_now(self) -> None:
        """Run the pass that `_learn` was called for."""
        super().learn(*self._pass)

    def _train_on(self, batch: Experience, episode: int, epoch: int, index: int) -> None:
        if self._batches.completes_update:
            super()._train_on(batch, episode, epoch, index)
            self._owner._after_update(episode)
            return
        with self.hooks.span("batch", episode=episode, epoch=epoch, batch=index, experience=batch) as span:
            self._owner._training_step(batch)
            span.set("metrics", {})

    def step(self, batch: Experience) -> Mapping[str, float]:
        self.metrics = {}
        self._owner.num_train_step = self.num_updates
        self._owner._training_step(batch)
        return self.metrics

    def start_episode(self, episode: int, metrics: Mapping[str, float]) -> None:
        self._record.start_episode(episode, self._owner._version, metrics)

    def after_update(self, metrics: Mapping[str, float]) -> None:
        self._record.update(metrics)

    def end_episode(self, episode: int) -> Mapping[str, float]:
        return self._owner._finish_episode(episode, self._record)
