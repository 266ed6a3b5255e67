"""`MakerFeed`: gives a maker its prompts, and sends its samples to those who train on them."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TypeVar

from rlhf_core.hooks import HookRelay
from rlhf_core.runfolder import PhaseTimer
from rlhf_core.types import PhaseTimes, Prompt, RolloutGroup

from .actor_context import HEARTBEAT_SECONDS, Heartbeat
from .calls import Call, NamedActors, collect
from .messages import Made
from .sample_store import store_groups

logger = logging.getLogger("rlhf.ray")

T = TypeVar("T")


class MakerFeed(ABC):
    """Sends groups to the takers in turn: actors with a method `submit`, such as trainers, or a run's coordinator.

    A taker that is full holds the maker up: a send waits until the previous one has been taken.
    """

    def __init__(
        self,
        name: str,
        number: int,
        hooks: HookRelay,
        takers: NamedActors,
        *,
        timeout_seconds: float,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
    ) -> None:
        """name, number: the maker's. timeout_seconds: longest wait for a taker to take what it was sent.
        heartbeat_seconds: the silence after which a taker holds the maker for dead.
        """
        self.name = name
        self.number = number
        self.hooks = hooks
        self.timer = PhaseTimer()
        self.times = PhaseTimes()
        self.num_samples = 0
        """Samples in all that was sent; `times` covers the same."""
        self._takers = takers
        self._timeout_seconds = timeout_seconds
        self._heartbeat_seconds = heartbeat_seconds
        self._next = 0
        self.sending = threading.RLock()
        """Held while something is sent: batches may be made side by side."""
        self._under_way: list[Call] = []
        self._num_under_way = 0

    @property
    @abstractmethod
    def sends_texts(self) -> bool:
        """Whether the takers want rollouts, beside the items."""

    @abstractmethod
    def batches(self) -> Iterator[tuple[int, list[Prompt]]]:
        """The prompts of each batch, and the era in which they were given out (see `RolloutWork`)."""

    def alive(self) -> Heartbeat:
        """Context in which the takers get signs of life."""
        return Heartbeat(self._beat, every_seconds=self._heartbeat_seconds / 4)

    def keep(self, group: RolloutGroup) -> bool:
        """Whether a group is to be trained on."""
        return not group.is_empty

    def success(self, group: RolloutGroup) -> float | None:
        """The share of a group's answers that succeeded, where a curriculum asks for it."""
        return None

    def send(self, era: int, groups: Sequence[RolloutGroup], times: PhaseTimes) -> None:
        """Send groups once the previous ones have been taken, and raise their errors. `times`: spent on these."""
        self.flush()
        self.times.add(times)
        self.num_samples += sum(len(group.items) for group in groups)
        stored = store_groups(groups, self.name, texts=self.sends_texts)
        made = [Made(each, self.keep(group), self.success(group)) for each, group in zip(stored, groups, strict=True)]
        dealt, self._next = deal(made, len(self._takers.names), self._next)
        self._under_way = [
            (taker, self._takers.handle(taker).submit.remote(self.name, era, part, times))
            for taker, part in zip(self._takers.names, dealt, strict=True)
            if part
        ]
        self._num_under_way = len(made)

    def flush(self) -> None:
        """Wait until everything sent has been taken."""
        with self.sending, self.timer.phase("send"):
            calls, self._under_way = self._under_way, []
            taken = collect(calls, timeout_seconds=self._timeout_seconds, doing="to take samples (is it full?)")
        if calls and (late := self._num_under_way - sum(taken)):
            logger.info(
                "%d of %d groups came too late: another maker was first, or the run went back to a checkpoint",
                late,
                self._num_under_way,
            )

    def _beat(self) -> None:
        for taker in self._takers.names:
            self._takers.handle(taker).maker_alive.remote(self.name)


def deal(items: Sequence[T], num_targets: int, first: int) -> tuple[list[list[T]], int]:
    """Distribute items in turn, starting with target `first`; also returns the next target."""
    dealt: list[list[T]] = [[] for _ in range(num_targets)]
    for place, item in enumerate(items):
        dealt[(first + place) % num_targets].append(item)
    return dealt, (first + len(items)) % num_targets
