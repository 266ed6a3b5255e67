"""Batch source of a detached trainer: draws from its buffer for as long as a maker may still send."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rlhf_core.errors import RlhfError, UserInputError
from rlhf_core.training import EpisodeBatches
from rlhf_core.types import Experience

from .actor_context import HEARTBEAT_SECONDS
from .coordinator_parts import ActorRegistry


@dataclass(frozen=True, slots=True)
class FitPlan:
    """How long a fit is. Steps count batches taken from the buffer."""

    total_steps: int
    update_steps: int
    """Batches of an episode: weights are sent after each."""
    train_epochs: int
    """Passes over the batches of an episode."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def num_episodes(self) -> int:
        """The last one is shorter where `update_steps` does not divide `total_steps`."""
        return math.ceil(self.total_steps / self.update_steps)

    def episode_steps(self, index: int) -> int:
        return min(self.update_steps, self.total_steps - index * self.update_steps)


class BufferSource:
    """Episodes of batches. The first pass trains on a batch as soon as it arrives; later passes shuffle those batches.

    `draw` returns a batch, or the reason why none will come.
    """

    def __init__(self, plan: FitPlan, draw: Callable[[], Experience | str], seed: int) -> None:
        self._plan = plan
        self._draw = draw
        self._seed = seed
        self._num_drawn = 0

    def episode(self, index: int) -> EpisodeBatches[Experience]:
        return EpisodeBatches(self._epochs(index))

    def _epochs(self, index: int) -> Iterator[Iterator[Experience]]:
        taken: list[Experience] = []
        yield self._first_pass(index, taken)
        for epoch in range(1, self._plan.train_epochs):
            order = list(taken)
            random.Random(f"{self._seed}/{index}/{epoch}").shuffle(order)
            yield iter(order)

    def _first_pass(self, index: int, taken: list[Experience]) -> Iterator[Experience]:
        for _ in range(self._plan.episode_steps(index)):
            batch = self._draw()
            if isinstance(batch, str):
                raise RlhfError(
                    f"fit ended after {self._num_drawn} of {self._plan.total_steps} batches: {batch}",
                    where="detached trainer",
                    hint="give the makers more prompts or epochs, or lower total_steps",
                )
            self._num_drawn += 1
            taken.append(batch)
            yield batch


_GRACE_SECONDS = 10.0
"""How long all makers must have been done before a fit gives up: the next loop of one may be about to start."""


class MakerPresence:
    """Tracks which makers may still send; thread-safe. One counts until it is done, silent, or its actor is gone."""

    def __init__(
        self,
        names: Sequence[str],
        is_alive: Callable[[str], bool],
        *,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """heartbeat_seconds: longest silence of a maker that has given a sign of life."""
        self._is_alive = is_alive
        self._lock = threading.Lock()
        self._registry = ActorRegistry(heartbeat_seconds, clock=clock)
        self._names = set(names)
        self._seen: set[str] = set()
        self._ended: dict[str, str] = {}
        """Maker -> how its last loop ended."""
        self._temperatures: dict[str, float] = {}
        self._all_ended_since: float | None = None

    def fit_begins(self) -> None:
        """Loops that ended until now may be those of an earlier fit."""
        with self._lock:
            self._all_ended_since = None

    def started(self, name: str, temperature: float) -> None:
        """Record that a maker starts a loop and samples at this temperature."""
        with self._lock:
            self._registry.forget(name)
            self._names.add(name)
            self._seen.add(name)
            self._ended.pop(name, None)
            self._temperatures[name] = temperature

    def seen(self, name: str) -> None:
        """Record a heartbeat: from the first on, more are expected until the loop is over."""
        with self._lock:
            self._registry.register(name)

    def done(self, name: str, error: str | None) -> None:
        """Record that a maker's loop is over; `error` is its failure, if any."""
        with self._lock:
            self._registry.forget(name)
            self._names.add(name)
            self._ended[name] = f"{name} is done" if error is None else f"{name} failed: {error}"

    @property
    def temperature(self) -> float | None:
        """Sampling temperature of all makers; None until one reports. Raises `UserInputError` when they differ."""
        with self._lock:
            values = set(self._temperatures.values())
        if len(values) > 1:
            raise UserInputError(
                f"the makers sample at different temperatures: {self._temperatures}",
                where="detached trainer",
                hint="give all makers the same temperature, so that log-probs can be compared",
            )
        return next(iter(values), None)

    def reason_for_none(self) -> str | None:
        """Why no maker will send anything more; None while one may."""
        with self._lock:
            running = self._names - self._ended.keys()
            seen, silent = set(self._seen), self._registry.stuck()
        for name in running:
            if name in silent:
                self.done(name, f"it {silent[name]}")
            elif self._is_alive(name):
                with self._lock:
                    self._seen.add(name)
            elif name in seen:
                self.done(name, "its actor is gone")
        with self._lock:
            if not self._names or self._names - self._ended.keys():
                self._all_ended_since = None
                return None
            now = time.monotonic()
            if self._all_ended_since is None:
                self._all_ended_since = now
            if now - self._all_ended_since < _GRACE_SECONDS:
                return None
            return "; ".join(self._ended[name] for name in sorted(self._ended))
