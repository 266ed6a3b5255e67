"""What feeds the loop of a detached trainer: batches from its buffer, as many episodes of them as a fit asks for."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rlhf_core.errors import RlhfError
from rlhf_core.training import EpisodeBatches
from rlhf_core.types import Experience


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
    """Episodes of batches. The first pass trains on a batch as soon as it is there; later ones shuffle what it took.

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
