"""Core's loop for `PPOTrainer`: each pass and each step calls the trainer's own methods."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from rlhf_core.hooks import HookRelay
from rlhf_core.training import EpisodeRecord, Trainer
from rlhf_core.types import Experience

from .collection import ExperienceSource

if TYPE_CHECKING:
    from .trainer import PPOTrainer


class TrainerLoop(Trainer[Experience]):
    """Calls the trainer's `_learn` for each pass and its `_training_step` for each batch.

    Only a batch that completes an update fires the hooks `rlhf_update_…` and enters the metrics.
    """

    def __init__(self, owner: PPOTrainer, source: ExperienceSource, hooks: HookRelay, record: EpisodeRecord) -> None:
        recorder = _Recorder(owner, record)
        super().__init__(source, self._step_of_owner, hooks=hooks, recorder=recorder, num_updates=owner.num_train_step)
        self._owner = owner
        self._batches = source
        self._pass: tuple[Iterable[Experience], int, int] = ((), 0, 0)
        self.metrics: Mapping[str, float] = {}
        """Metrics of the last step; kept here because the seed's `_training_step` returns nothing."""

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
        with self._hooks.span("batch", episode=episode, epoch=epoch, batch=index, experience=batch) as span:
            self._owner._training_step(batch)
            span.set("metrics", {})

    def _step_of_owner(self, experience: Experience) -> Mapping[str, float]:
        self.metrics = {}
        self._owner.num_train_step = self.num_updates
        self._owner._training_step(experience)
        return self.metrics


class _Recorder:
    """Receives the loop's events and passes them to the record and the trainer."""

    def __init__(self, owner: PPOTrainer, record: EpisodeRecord) -> None:
        self._owner = owner
        self._record = record

    def start_episode(self, episode: int, metrics: Mapping[str, float]) -> None:
        self._record.start_episode(episode, self._owner._version, metrics)

    def update(self, metrics: Mapping[str, float]) -> None:
        self._record.update(metrics)

    def end_episode(self, episode: int) -> Mapping[str, float]:
        return self._owner._finish_episode(episode, self._record)
