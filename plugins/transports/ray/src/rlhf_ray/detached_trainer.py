"""`DetachedTrainer`: base class of the seed's trainers, which receive samples from other actors."""

from __future__ import annotations

import logging
import math
import random
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray

from rlhf_core.batching import pin_memory, to_device
from rlhf_core.errors import DeadlineError, RlhfError
from rlhf_core.hooks import HookRelay
from rlhf_core.hookspecs import FitInfo
from rlhf_core.runfolder import PhaseTimer
from rlhf_core.training import EpisodeBatches, Metrics, Trainer
from rlhf_core.types import BufferItem, Experience, PhaseTimes
from rlhf_seed import adapt_callback

from .actor_context import show_debug_messages
from .calls import NamedActors, get_named_actor
from .maker_presence import MakerPresence
from .replay_buffer import DetachedReplayBuffer
from .sample_store import StoredGroup, fetch_groups

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_POLL_SECONDS = 1.0
"""Interval at which a wait for a batch checks whether a maker may still send."""


@dataclass(frozen=True, slots=True)
class FitPlan:
    """Length of a fit. Steps count batches taken from the buffer.

    Example:
        >>> plan = FitPlan(total_steps=5, update_steps=2, train_epochs=1)
        >>> [plan.episode_steps(index) for index in range(plan.num_episodes)]
        [2, 2, 1]
    """

    total_steps: int
    update_steps: int
    """Batches of an episode. Weights are sent after each episode."""
    train_epochs: int
    """Passes over the batches of an episode."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def num_episodes(self) -> int:
        """Number of episodes. The last is shorter if `update_steps` does not divide `total_steps`."""
        return math.ceil(self.total_steps / self.update_steps)

    def episode_steps(self, index: int) -> int:
        """Number of batches of episode `index`, from 0."""
        return min(self.update_steps, self.total_steps - index * self.update_steps)


class DetachedTrainer(Trainer[Experience]):
    """Trains on experience that `ExperienceMakerHolder` actors send to its buffer.

    Subclass it and start the subclass under the name that the makers use to find it. Makers are looked up on first use,
    since makers and trainers refer to each other by name. `rlhf_core.training.loop.Trainer` is the loop.

    Makers call `maker_started`, `maker_alive`, `submit` and `maker_done`. The trainer calls `training_step` on every
    rank for each batch, and `_update_remote_makers` on every rank after each episode.

    Example:
        @ray.remote(concurrency_groups={"buffer_length": 1, "buffer_append": 1, "buffer_sample": 1, "compute": 1})
        class MyTrainer(DetachedTrainer):
            def training_step(self, experience): ...
            def _update_remote_makers(self, fully_update=False, **kwargs): ...

        trainer = MyTrainer.options(name="trainer").remote(["maker"])
        ray.get(trainer.fit.remote(total_steps=8, update_steps=2))
    """

    def __init__(
        self,
        experience_maker_holder_name_list: list[str],
        train_batch_size: int = 8,
        buffer_limit: int = 0,
        dataloader_pin_memory: bool = True,
        callbacks: list[Any] = [],  # noqa: B006 - the seed's default, never changed
        debug: bool = False,
        *,
        batch_timeout_seconds: float = 1800.0,
        actor_timeout_seconds: float = 60.0,
        seed: int = 0,
    ) -> None:
        """Create the trainer and its buffer.

        Args:
            experience_maker_holder_name_list: Names of the makers that receive the new weights.
            train_batch_size: Samples per batch of this trainer.
            buffer_limit: Maximum number of batches in the buffer. 0 or less: unlimited.
            dataloader_pin_memory: Keep batches in page-locked memory if there is a GPU.
            callbacks: Hook plugins (`rlhf_…`), or objects with the seed's `on_…` methods.
            debug: Print debug messages.
            batch_timeout_seconds: Maximum wait for a batch, or of a maker for space in the buffer.
            actor_timeout_seconds: Maximum wait for a named maker that has not started yet.
            seed: Seed of the shuffling.
        """
        super().__init__(HookRelay())
        self.train_batch_size = train_batch_size
        self.detached_replay_buffer = DetachedReplayBuffer(
            train_batch_size, limit=buffer_limit, timeout_seconds=batch_timeout_seconds, is_shared=False
        )
        self.dataloader_pin_memory = dataloader_pin_memory
        self.makers = NamedActors(experience_maker_holder_name_list, timeout_seconds=actor_timeout_seconds)
        self.policy_version = 0
        """Number of weight syncs so far."""
        for callback in callbacks:
            self.hooks.register(adapt_callback(callback))
        self._presence = MakerPresence(
            experience_maker_holder_name_list, lambda name: get_named_actor(name) is not None
        )
        self._batch_timeout_seconds = batch_timeout_seconds
        self._seed = seed
        self._plan = FitPlan(1, 1, 1)
        self._num_taken = 0
        """Batches taken in this fit."""
        self._timer = PhaseTimer()
        """Times the phases of an episode. The remaining time was spent waiting for batches."""
        self._num_tokens = 0
        """Unpadded tokens trained on in the episode, including prompts."""
        if debug:
            show_debug_messages()

    @abstractmethod
    def _update_remote_makers(self, fully_update: bool = False, **kwargs: Any) -> None:
        """Send the weights to `self.makers`, as version `self.policy_version + 1`."""

    @abstractmethod
    def training_step(self, experience: Experience) -> dict[str, Any]:
        """Train on one batch and return its metrics."""

    def fit(self, total_steps: int, update_steps: int, train_epochs: int = 1) -> None:
        """Train on `total_steps` batches from the buffer, and send the weights after every `update_steps` of them.

        Args:
            total_steps: Number of batches taken from the buffer.
            update_steps: Batches per episode.
            train_epochs: Passes over the batches of an episode.

        Raises:
            RlhfError: All makers have finished or were lost, and no whole batch is left. Training so far is kept.
        """
        self._plan = FitPlan(total_steps, update_steps, train_epochs)
        self._num_taken = 0
        self._presence.start_fit()
        self.makers.forget_handles()
        self.run(self._fit_info(self._plan))

    def sync_models_to_remote_makers(self, **kwargs: Any) -> None:
        """Send the full weights now. Keyword arguments are passed to `_update_remote_makers`."""
        self.makers.forget_handles()
        self._sync(fully_update=True, **kwargs)

    @ray.method(concurrency_group="buffer_length")
    def buffer_get_length(self) -> int:
        """Return the number of whole batches in the buffer."""
        return self.detached_replay_buffer.get_length()

    @ray.method(concurrency_group="buffer_append")
    def buffer_append(self, experience: Experience) -> None:
        """Add a batch's samples. Waits while the buffer is full."""
        logger.debug("received %d samples", len(experience))
        self.detached_replay_buffer.append(experience)

    @ray.method(concurrency_group="buffer_append")
    def buffer_extend(self, items: Sequence[BufferItem]) -> None:
        """Add samples. Waits while the buffer is full."""
        logger.debug("received %d samples", len(items))
        self.detached_replay_buffer.extend(items)

    @ray.method(concurrency_group="buffer_append")
    def submit(self, maker: str, era: int, groups: Sequence[StoredGroup], times: PhaseTimes) -> int:
        """Add the samples of finished groups, and return the number of groups. Called by makers."""
        fetched, lost = fetch_groups(groups, timeout_seconds=self._batch_timeout_seconds)
        if lost:
            logger.warning("%d groups were lost with %s", len(lost), maker)
        self.buffer_extend([item for group in fetched for item in group.items])  # type: ignore[operator]
        return len(fetched)

    # Uses the concurrency group buffer_length, since a full buffer may block buffer_append.
    @ray.method(concurrency_group="buffer_length")
    def maker_started(self, name: str) -> None:
        """Record that a maker starts a loop."""
        self._presence.record_start(name)

    @ray.method(concurrency_group="buffer_length")
    def maker_alive(self, name: str) -> None:
        """Record a heartbeat of a maker, sent while its loop runs."""
        self._presence.record_heartbeat(name)

    @ray.method(concurrency_group="buffer_length")
    def maker_done(self, name: str, error: str | None = None) -> None:
        """Record that a maker's loop is over and all its samples are sent. `error` is its failure, if any."""
        self._presence.record_end(name, error)

    @ray.method(concurrency_group="buffer_sample")
    def _buffer_sample(self, timeout_seconds: float | None = None) -> Experience:
        return self.detached_replay_buffer.sample(timeout_seconds=timeout_seconds)

    def _step_device(self) -> torch.device:
        """Device of the batches passed to `training_step`."""
        import torch

        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def _agree(self, outcome: Experience | str) -> Experience | str:
        """Agree with the other trainers of the process group, in which a reason to stop on any rank stops all."""
        return outcome

    def _draw(self) -> Experience | str:
        """Return the next batch, or the reason that none will come. Checks regularly whether a maker may still send."""
        deadline = time.monotonic() + self._batch_timeout_seconds
        outcome: Experience | str | None = None
        while outcome is None:
            try:
                outcome = self._buffer_sample(_POLL_SECONDS)  # type: ignore[operator]
            except DeadlineError as error:
                outcome = self._presence.reason_all_ended()
                if outcome is None and time.monotonic() > deadline:
                    outcome = f"no batch came in {self._batch_timeout_seconds:g} s ({error.message})"
        agreed = self._agree(outcome)
        use_pinned = self.dataloader_pin_memory and self._step_device().type == "cuda"
        return pin_memory(agreed) if use_pinned and not isinstance(agreed, str) else agreed

    def _sync(self, fully_update: bool = False, **kwargs: Any) -> None:
        with self.hooks.span("sync", version=self.policy_version + 1):
            self._update_remote_makers(fully_update=fully_update, **kwargs)
        self.policy_version += 1

    def _fit_info(self, plan: FitPlan) -> FitInfo:
        return FitInfo(
            algorithm=type(self).__name__,
            num_episodes=plan.num_episodes,
            samples_per_episode=plan.update_steps * self.train_batch_size,
            updates_per_episode=plan.update_steps * plan.train_epochs,
        )

    # Called by the loop.

    def batches(self, episode: int) -> EpisodeBatches[Experience]:
        """Batches of an episode: the first pass yields each on arrival, and later passes shuffle them."""
        return EpisodeBatches(self._epochs(episode))

    def _epochs(self, episode: int) -> Iterator[Iterator[Experience]]:
        taken: list[Experience] = []
        yield self._first_pass(episode, taken)
        for epoch in range(1, self._plan.train_epochs):
            order = list(taken)
            random.Random(f"{self._seed}/{episode}/{epoch}").shuffle(order)
            yield iter(order)

    def _first_pass(self, episode: int, taken: list[Experience]) -> Iterator[Experience]:
        for _ in range(self._plan.episode_steps(episode)):
            batch = self._draw()
            if isinstance(batch, str):
                raise RlhfError(
                    f"fit ended after {self._num_taken} of {self._plan.total_steps} batches: {batch}",
                    where="detached trainer",
                    hint="give the makers more prompts or epochs, or lower total_steps",
                )
            self._num_taken += 1
            taken.append(batch)
            yield batch

    def start_episode(self, episode: int, metrics: Metrics) -> None:
        self._timer.take()
        self._num_tokens = 0

    def step(self, batch: Experience) -> Metrics:
        with self._timer.phase("train"):
            metrics = self.training_step(to_device(batch, self._step_device()))
        self._num_tokens += int(batch.attention_mask.sum())
        logger.debug("trained on %d samples: %s", len(batch), metrics)
        return metrics

    def end_episode(self, episode: int) -> Metrics:
        with self._timer.phase("sync"):
            self._sync()
        rate = self._num_tokens / max(self._timer.seconds("train"), 1e-9)
        return {**self._timer.take(), "tokens_per_second/train": rate}
