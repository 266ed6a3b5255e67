"""The one loop: fit > episode > epoch > batch > update.

Local and detached runs, PPO and every other algorithm, rollouts and datasets all go through `Trainer.fit`; they differ
in the `BatchSource` of batches, the `step` that trains on a batch, and the `Recorder` of events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from ..hooks.relay import HookRelay
from ..hookspecs import FitInfo

B = TypeVar("B")
B_co = TypeVar("B_co", covariant=True)
Metrics = Mapping[str, float]
"""Key -> value of an episode or an update."""


class SkippedUpdate(Exception):
    """Raised by `step` for a skipped batch: no update was made, and the loop continues with the next batch."""


@dataclass(frozen=True, slots=True)
class EpisodeBatches(Generic[B_co]):
    """The batches of an episode."""

    epochs: Iterable[Iterable[B_co]]
    """Passes over the episode; both iterables may be lazy."""
    metrics: Metrics = field(default_factory=dict)
    """Values of the episode, on each of its lines."""


class BatchSource(Protocol[B_co]):
    """Source of batches: rollouts or a dataset."""

    def episode(self, index: int) -> EpisodeBatches[B_co]: ...


class Recorder(Protocol):
    """Receives the events of an episode, and then publishes, evaluates, saves. Any call may end the fit."""

    def start_episode(self, episode: int, metrics: Metrics) -> None: ...

    def update(self, metrics: Metrics) -> None: ...

    def end_episode(self, episode: int) -> Metrics:
        """Called after the last update. Returns the values of the episode's last line."""
        ...


class Trainer(Generic[B]):
    """Runs episodes. `step` trains on one batch and returns its metrics; one batch is one update.

    `step` may raise `SkippedUpdate`, after saying why: that batch makes no update.
    """

    def __init__(
        self,
        source: BatchSource[B],
        step: Callable[[B], Metrics],
        *,
        hooks: HookRelay,
        recorder: Recorder,
        num_updates: int = 0,
    ) -> None:
        self._source = source
        self._step = step
        self._hooks = hooks
        self._recorder = recorder
        self.num_updates = num_updates
        """Updates so far, over the whole run."""
        self.skips_rest = False
        """Set it to leave out the remaining updates of the current episode."""
        self.is_finished = False
        """Set it to let the current episode be the last."""

    def fit(self, info: FitInfo) -> None:
        """Train on episodes `info.first_episode` up to `info.num_episodes`, or until `is_finished`."""
        with self._hooks.span("fit", info=info):
            for episode in range(info.first_episode, info.num_episodes):
                with self._hooks.span("episode", episode=episode) as span:
                    span.set("metrics", self._run_episode(episode))
                if self.is_finished:
                    return

    def _run_episode(self, episode: int) -> Metrics:
        data = self._source.episode(episode)
        self._recorder.start_episode(episode, data.metrics)
        self.skips_rest = False
        for epoch, batches in enumerate(data.epochs):
            with self._hooks.span("epoch", episode=episode, epoch=epoch):
                self.learn(batches, episode, epoch)
            if self.skips_rest:
                break
        return self._recorder.end_episode(episode)

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
        with self._hooks.span("batch", episode=episode, epoch=epoch, batch=index, experience=batch) as batch_span:
            with self._hooks.span("update", step=self.num_updates) as update_span:
                metrics = self._step(batch)
                update_span.set("metrics", metrics)
            batch_span.set("metrics", metrics)
        self._recorder.update(metrics)
