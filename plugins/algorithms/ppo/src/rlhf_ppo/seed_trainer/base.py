"""`OLTrainer`: the base of the seed's trainers that learn from answers they sample."""

from __future__ import annotations

import logging
from typing import Any

from rlhf_core.batching import collate, split
from rlhf_core.types import BufferItem, Experience
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


class OLTrainer:
    """Attributes of such a trainer, and the steps of its `fit`, each of which a subclass may override.

    `fit` calls `_before_fit` once. An episode is `num_collect_steps` calls of `_make_experience`, whose samples go into
    `data_buffer`, then `num_update_steps` calls of `_learn`, which calls `_training_step` for each batch; where due,
    `_save_checkpoint` follows.
    """

    def __init__(
        self,
        actor_booster: Any,
        critic_booster: Any,
        data_buffer: SampleBuffer,
        sample_buffer: bool,
        dataloader_pin_memory: bool,
        callbacks: list[Any],
    ) -> None:
        self.actor_booster = actor_booster
        self.critic_booster = critic_booster
        self.data_buffer = data_buffer
        self.sample_buffer = sample_buffer
        self.dataloader_pin_memory = dataloader_pin_memory
        self.callbacks = callbacks
