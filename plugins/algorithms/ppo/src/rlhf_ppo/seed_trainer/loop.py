"""Core's loop for `PPOTrainer`: collect steps fill a buffer, update steps pass over it.

Each collect step, pass and batch calls the trainer's own methods.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch

from rlhf_core.batching import collate, to_device
from rlhf_core.rollout import made_episode
from rlhf_core.training import EpisodeBatches, EpisodeEstimates, EpisodeRecord, Trainer
from rlhf_core.types import BufferItem, Experience

from .base import SampleBuffer
from .parts import SeedMaker, TrainerContext


class LoopOwner(Protocol):
    """The attributes and methods of `PPOTrainer` that its loop uses."""

    device: torch.device
    data_buffer: SampleBuffer
    accumulation_steps: int
    num_train_step: int
    experience_maker: SeedMaker
    _context: TrainerContext
    _record: EpisodeRecord
    _version: int

    def _make_experience(self, collect_step: int) -> Experience: ...

    def _learn(self, update_step: int) -> None: ...

    def _training_step(self, experience: Experience) -> None: ...

    def _after_update(self, episode: int) -> None: ...

    def _finish_episode(self, episode: int) -> Mapping[str, float]: ...


class TrainerLoop(Trainer[Experience]):
    """Calls the trainer's `_make_experience`, its `_learn` for each pass and its `_training_step` for each batch.

    Every rank collects from its own prompts, then all ranks exchange their samples. Batches are `Experience`, as the
    seed's steps and callbacks expect. Only a batch that completes an update fires the hooks `rlhf_update_…` and enters
    the metrics.
    """

    def __init__(
        self, owner: LoopOwner, estimates: EpisodeEstimates, *, num_collect_steps: int, num_passes: int
    ) -> None:
        context = owner._context
        super().__init__(context.hooks, owner.num_train_step)
        self._owner = owner
        self._estimates = estimates
        self._record = owner._record
        self._num_collect_steps = num_collect_steps
        self._num_passes = num_passes
        self._device = None if context.batching.buffer_cpu_offload else owner.device
        """The device that holds the episode's samples until they are used; None is the CPU."""
        self._num_batches = 0
        self._pass: tuple[Iterable[Experience], int, int] = ((), 0, 0)
        self.gap_version: int | None = None
        """Policy version to measure the log-prob gap against; None after an episode's first step."""
        self.ends_episode = False
        """Whether the batch yielded last is the episode's last."""
        self.metrics: Mapping[str, float] = {}
        """Metrics of the last step; kept here because the seed's `_training_step` returns nothing."""

    @property
    def completes_update(self) -> bool:
        """Whether the optimizers step after the batch yielded last: `accumulation_steps` of them, across an episode's
        passes; the last step of an episode may have fewer."""
        return self.ends_episode or self._num_batches % self._owner.accumulation_steps == 0

    def batches(self, episode: int) -> EpisodeBatches[Experience]:
        buffer = self._owner.data_buffer
        buffer.clear()
        self.gap_version = self._owner._version
        for step in range(self._num_collect_steps):
            buffer.append(self._owner._make_experience(step))
        everywhere = self._owner._context.strategy.all_gather_objects(buffer.items)
        times = self._owner.experience_maker.take_times()
        made = made_episode([item for part in everywhere for item in part], times)
        estimated = self._estimates.of(made, self._owner._version, timer=self._record.timer)
        buffer.items = list(estimated.items)
        self._record.rollouts(episode, made, estimated)
        self._num_batches, placed = 0, dict[tuple[int, int], BufferItem]()
        epochs = (self._experiences(list(each), n, placed) for n, each in enumerate(estimated.epochs, start=1))
        return EpisodeBatches(epochs, estimated.metrics)

    def _experiences(
        self, batches: Sequence[list[BufferItem]], number: int, placed: dict[tuple[int, int], BufferItem]
    ) -> Iterator[Experience]:
        for batch in batches:
            self._num_batches += 1
            self.ends_episode = number == self._num_passes and batch is batches[-1]
            yield collate([self._place(item, placed) for item in batch])

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

    def learn(self, batches: Iterable[Experience], episode: int, epoch: int) -> None:
        self._pass = (batches, episode, epoch)
        self._owner._learn(epoch)

    def learn_now(self) -> None:
        """Run the pass that `_learn` was called for."""
        super().learn(*self._pass)

    def _train_on(self, batch: Experience, episode: int, epoch: int, index: int) -> None:
        if self.completes_update:
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
        return self._owner._finish_episode(episode)
