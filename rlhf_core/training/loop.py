"""The one loop: fit > episode > epoch > batch > update.

Local and detached runs, PPO and every other algorithm, rollouts and datasets all go through `Trainer.run`. A subclass
says where batches come from, how to train on one, and what happens at the borders of an episode.
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
    """Raised by `Trainer.step` for a skipped batch: no update was made, and the loop continues with the next batch."""


@dataclass(frozen=True, slots=True)
class EpisodeBatches(Generic[B]):
    """The batches of an episode."""

    epochs: Iterable[Iterable[B]]
    """Passes over the episode; both iterables may be lazy."""
    metrics: Metrics = field(default_factory=dict)
    """Values of the episode, on each of its lines."""


class Trainer(ABC, Generic[B]):
    """Runs episodes. Any method of a subclass may end the fit by an error."""

    def __init__(self, hooks: HookRelay, num_updates: int = 0) -> None:
        self.hooks = hooks
        self.num_updates = num_updates
        """Updates so far, over the whole run."""
        self.skips_rest = False
        """Set it to leave out the remaining updates of the current episode."""
        self.is_finished = False
        """Set it to let the current episode be the last."""

    @abstractmethod
    def batches(self, episode: int) -> EpisodeBatches[B]:
        """The batches of an episode, which is collected or read now."""

    @abstractmethod
    def step(self, batch: B) -> Metrics:
        """Train on one batch, which is one update, and return its metrics.

        May raise `SkippedUpdate`, after saying why: that batch makes no update.
        """

    def start_episode(self, episode: int, metrics: Metrics) -> None:
        """Called before the first update of an episode, with its values."""

    def after_update(self, metrics: Metrics) -> None:
        """Called after each update."""

    @abstractmethod
    def end_episode(self, episode: int) -> Metrics:
        """Publish, evaluate, save. Returns the values of the episode's last line."""

    def run(self, info: FitInfo) -> None:
        """Train on episodes `info.first_episode` up to `info.num_episodes`, or until `is_finished`."""
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
        """Train on one pass. A subclass may extend it."""
        for index, batch in enumerate(batches):
            try:
                self._train_on(batch, episode, epoch, index)
            except SkippedUpdate:
                self.num_updates -= 1  # the raiser has logged why
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
