"""`OLTrainer`: base of ColossalChat's trainers that learn from answers they sample."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rlhf_core.batching import collate, split, to_device
from rlhf_core.hooks import HookRelay
from rlhf_core.rollout import collected_episode
from rlhf_core.training import EpisodeBatches, EpisodeEstimator, EpisodeRecord, Metrics, Trainer
from rlhf_core.types import BufferItem, Experience
from rlhf_core.util import permutation
from rlhf_seed import adapt_callback

from .parts import SeedMaker, TrainerContext

logger = logging.getLogger("rlhf")


class SampleBuffer:
    """`PPOTrainer.data_buffer`: this process's samples of the current episode, newest last.

    During collection the samples have raw rewards only. When training starts, they are redistributed over the processes
    and get advantages.
    """

    def __init__(self, sample_batch_size: int, limit: int, *, seed: int) -> None:
        """Create an empty buffer.

        Args:
            sample_batch_size: Maximum number of samples that `sample` returns.
            limit: Maximum number of samples kept, oldest dropped first. 0 or less means unlimited.
            seed: Random seed of `sample`.
        """
        self.items: list[BufferItem] = []
        self.limit = limit
        self._sample_batch_size = sample_batch_size
        self._seed = seed
        self._num_drawn = 0

    def __len__(self) -> int:
        return len(self.items)

    def append(self, experience: Experience) -> None:
        """Add a batch's samples. Beyond the limit the oldest are dropped with a warning."""
        self.items += split(experience)
        num_dropped = len(self.items) - self.limit if self.limit > 0 else 0
        if num_dropped > 0:
            logger.warning(
                "buffer_limit is %d samples: dropped the %d oldest of %d before training on them",
                self.limit,
                num_dropped,
                len(self.items),
            )
            del self.items[:num_dropped]

    def sample(self) -> Experience:
        """Draw a random batch of at most `train_batch_size` samples."""
        self._num_drawn += 1
        order = permutation(len(self.items), self._seed, "data-buffer", self._num_drawn)
        return collate([self.items[index] for index in order[: self._sample_batch_size]])

    def clear(self) -> None:
        """Remove all samples."""
        self.items.clear()


class OLTrainer(Trainer[Experience]):
    """Attributes of an online trainer, and the steps of its `fit`, which a subclass may override.

    `fit` calls `_before_fit` once. An episode is `num_collect_steps` calls of `_make_experience`, whose samples go into
    `data_buffer`, then `num_update_steps` calls of `_learn`, which calls `_training_step` for each batch, followed by
    `_save_checkpoint` if a checkpoint is due.

    The loop is core's. Every rank collects from its own prompts, then all ranks exchange their samples. Batches are
    `Experience`, as ColossalChat's steps and callbacks expect. Only a batch that completes an update calls the hooks
    `rlhf_update_…` and is logged.
    """

    experience_maker: SeedMaker
    accumulation_steps: int
    _context: TrainerContext
    _estimates: EpisodeEstimator
    _record: EpisodeRecord
    _num_collect_steps: int
    _num_passes: int
    _pass: tuple[Iterable[Experience], int, int]
    """The pass that `_learn` runs: its batches, episode and number."""

    def __init__(
        self,
        actor_booster: Any,
        critic_booster: Any,
        data_buffer: SampleBuffer,
        sample_buffer: bool,
        dataloader_pin_memory: bool,
        callbacks: list[Any],
    ) -> None:
        super().__init__(HookRelay())
        self.actor_booster = actor_booster
        self.critic_booster = critic_booster
        self.data_buffer = data_buffer
        self.sample_buffer = sample_buffer
        self.dataloader_pin_memory = dataloader_pin_memory
        self.callbacks = callbacks
        for callback in callbacks:
            self.hooks.register(adapt_callback(callback))
        self.num_train_step = 0
        """Optimizer steps so far, over all fits, including those before a resume."""
        self._version = 0
        self._gap_version: int | None = None
        """Policy version against which to measure the log-prob gap. None after an episode's first step."""
        self._episode = 0
        self._num_batches = 0
        self._ends_episode = False
        """Whether the last yielded batch is the episode's last."""
        self._metrics: Metrics = {}
        """Metrics of the last step, stored here because ColossalChat's `_training_step` returns nothing."""

    @abstractmethod
    def _make_experience(self, collect_step: int) -> Experience: ...

    def _learn(self, update_step: int) -> None:
        super().learn(*self._pass)

    @abstractmethod
    def _training_step(self, experience: Experience) -> None: ...

    @property
    def completes_update(self) -> bool:
        """Whether the current batch is the last of an optimizer step, or of its episode.

        A step takes `accumulation_steps` batches, across an episode's passes. The last step of an episode may have
        fewer.
        """
        return self._ends_episode or self._num_batches % self.accumulation_steps == 0

    def batches(self, episode: int) -> EpisodeBatches[Experience]:
        buffer = self.data_buffer
        buffer.clear()
        self._episode, self._gap_version = episode, self._version
        for step in range(self._num_collect_steps):
            buffer.append(self._make_experience(step))
        gathered = self._context.strategy.all_gather_objects(buffer.items)
        times = self.experience_maker.take_times()
        collected = collected_episode([item for part in gathered for item in part], times)
        estimated = self._estimates.of(collected, self._version, timer=self._record.timer)
        buffer.items = list(estimated.items)
        self._record.rollouts(episode, collected, estimated)
        self._num_batches, placed = 0, dict[tuple[int, int], BufferItem]()
        epochs = (self._experiences(list(each), n, placed) for n, each in enumerate(estimated.epochs, start=1))
        return EpisodeBatches(epochs, estimated.metrics)

    def _experiences(
        self, batches: Sequence[list[BufferItem]], number: int, placed: dict[tuple[int, int], BufferItem]
    ) -> Iterator[Experience]:
        for batch in batches:
            self._num_batches += 1
            self._ends_episode = number == self._num_passes and batch is batches[-1]
            yield collate([self._place(item, placed) for item in batch])

    def _place(self, item: BufferItem, placed: dict[tuple[int, int], BufferItem]) -> BufferItem:
        """Return the item on the device, moved once per episode, or on the CPU if `buffer_cpu_offload`."""
        if self._context.batching.buffer_cpu_offload:
            return item
        device = self._context.strategy.device
        if not bool(item.action_mask.any()):
            return to_device(item, device)  # a masked copy with the same id as its sample
        place = item.sample_id, item.branch
        if place not in placed:
            placed[place] = to_device(item, device)
        return placed[place]

    def start_episode(self, episode: int, metrics: Metrics) -> None:
        self._record.start_episode(episode, self._version, metrics)

    def learn(self, batches: Iterable[Experience], episode: int, epoch: int) -> None:
        self._pass = (batches, episode, epoch)
        self._learn(epoch)

    def _train_on(self, batch: Experience, episode: int, epoch: int, index: int) -> None:
        if self.completes_update:
            super()._train_on(batch, episode, epoch, index)
            return
        with self.hooks.span("batch", episode=episode, epoch=epoch, batch=index, experience=batch) as span:
            self._training_step(batch)
            span.set("metrics", {})

    def step(self, batch: Experience) -> Metrics:
        self._metrics = {}
        self.num_train_step = self.num_updates
        self._training_step(batch)
        return self._metrics
