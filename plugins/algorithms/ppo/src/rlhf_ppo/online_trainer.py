"""`OLTrainer`: the base of the seed's trainers that learn from answers they sample."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

from rlhf_core.types import Experience

from .collection import SampleBuffer


class OLTrainer(ABC):
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

    @abstractmethod
    def fit(
        self,
        num_episodes: int,
        num_collect_steps: int,
        num_update_steps: int,
        prompt_dataloader: Iterable[Any],
        pretrain_dataloader: Iterable[Mapping[str, Any]] | None = None,
        log_dir: str | None = None,
        use_wandb: bool = False,
    ) -> None:
        """Train for `num_episodes`."""

    @abstractmethod
    def _before_fit(
        self,
        prompt_dataloader: Iterable[Any],
        pretrain_dataloader: Iterable[Mapping[str, Any]] | None = None,
        log_dir: str | None = None,
        use_wandb: bool = False,
    ) -> None:
        """Take the loaders and open the logs."""

    @abstractmethod
    def _make_experience(self, collect_step: int) -> Experience:
        """Sample answers to the next batch of prompts."""

    @abstractmethod
    def _learn(self, update_step: int) -> None:
        """Make one pass over the collected samples."""

    @abstractmethod
    def _training_step(self, experience: Experience) -> None:
        """Train on one batch."""

    @abstractmethod
    def _save_checkpoint(self, episode: int = 0) -> None:
        """Write a checkpoint to resume from; `episode` episodes are done."""
