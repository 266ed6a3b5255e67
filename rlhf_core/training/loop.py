"""The training loop: fit > episode > epoch > batch > update.

Local and detached runs, PPO and every other algorithm, rollouts and datasets all use `Trainer.run`. A subclass provides
the batches, the training on one batch, and the work at the start and end of an episode.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ..hooks.relay import HookRelay
from ..hookspecs import FitInfo

B = TypeVar("B")
Metrics = Mapping[str, float]
"""Key -> value of an episode or an update."""


class SkippedUpdate(Exception):
    """Raised by `Trainer.step` to skip a batch. The loop counts no update and continues with the next batch."""


@dataclass(frozen=True, slots=True)
class EpisodeBatches(Generic[B]):
    """The batches of an episode."""

    epochs: Iterable[Iterable[B]]
    """Passes over the episode. Both iterables may be lazy."""
    metrics: Metrics = field(default_factory=dict)
    """Metrics of the episode, logged on each of its lines."""


class Trainer(ABC, Generic[B]):
    """Runs episodes. An error in any method of a subclass ends the fit.

    A transport calls `run` on every trainer rank. All ranks make the same number of calls, each with its own part of
    the batches.

    Example:
        for episode in range(info.first_episode, info.num_episodes):  # in `run`, on each trainer rank
            data = trainer.batches(episode)
            trainer.start_episode(episode, data.metrics)
            for batch in chain.from_iterable(data.epochs):
                trainer.after_update(trainer.step(batch))
            metrics = trainer.end_episode(episode)
    """

    def __init__(self, hooks: HookRelay, num_updates: int = 0) -> None:
        """Create a trainer.

        Args:
            hooks: Receives the start and end of the fit and each episode, epoch, batch and update.
            num_updates: Updates made before this fit, if it resumes a run.
        """
        self.hooks = hooks
        self.num_updates = num_updates
        """Number of updates so far, over the whole run."""
        self.skips_rest = False
        """Set to True to skip the remaining updates of the current episode."""
        self.is_finished = False
        """Set to True to end the run after the current episode."""

    @abstractmethod
    def batches(self, episode: int) -> EpisodeBatches[B]:
        """Collect or read an episode and return its batches.

        Args:
            episode: Index from 0.
        """

    @abstractmethod
    def step(self, batch: B) -> Metrics:
        """Train on one batch, which is one update, and return its metrics.

        Args:
            batch: This rank's part of a batch.

        Raises:
            SkippedUpdate: The batch is skipped. The reason must be logged before.
        """

    def start_episode(self, episode: int, metrics: Metrics) -> None:
        """Prepare for the first update of an episode.

        Args:
            episode: Index from 0.
            metrics: Metrics of the episode, from its `EpisodeBatches`.
        """

    def after_update(self, metrics: Metrics) -> None:
        """Handle the result of an update.

        Args:
            metrics: The result of `step`.
        """

    @abstractmethod
    def end_episode(self, episode: int) -> Metrics:
        """Publish, evaluate and save. Returns the metrics of the episode's last line.

        Args:
            episode: Index from 0.
        """

    def run(self, info: FitInfo) -> None:
        """Train on the episodes of a fit, or until `is_finished`.

        Args:
            info: Episodes `first_episode` up to and excluding `num_episodes` are run.
        """
        with self.hooks.span("fit", info=info):
            for episode in range(info.first_episode, info.num_episodes):
                with self.hooks.span("episode", episode=episode) as span:
                    span.set("metrics", self._run_episode(episode))
                if self.is_finished:
                    return

    def _run_episode(self, episode: int) -> Metrics:
        data = self.batches(episode)
        self.start_episode(episode, data.metrics)
        self.skips_rest = False
        for epoch, batches in enumerate(data.epochs):
            with self.hooks.span("epoch", episode=episode, epoch=epoch):
                self.learn(batches, episode, epoch)
            if self.skips_rest:
                break
        return self.end_episode(episode)

    def learn(self, batches: Iterable[B], episode: int, epoch: int) -> None:
        """Train on one pass over an episode. A subclass may extend it.

        Args:
            batches: The batches of the pass, which may be lazy.
            episode: Index from 0.
            epoch: Index of the pass, from 0.
        """
        for index, batch in enumerate(batches):
            try:
                self._train_on(batch, episode, epoch, index)
            except SkippedUpdate:
                self.num_updates -= 1  # `step` has logged the reason
            if self.skips_rest:
                return

    def _train_on(self, batch: B, episode: int, epoch: int, index: int) -> None:
        self.num_updates += 1
        with self.hooks.span("batch", episode=episode, epoch=epoch, batch=index, experience=batch) as batch_span:
            with self.hooks.span("update", step=self.num_updates) as update_span:
                metrics = self.step(batch)
                update_span.set("metrics", metrics)
            batch_span.set("metrics", metrics)
        self.after_update(metrics)
