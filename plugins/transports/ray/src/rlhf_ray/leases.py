"""`LeasedCoordinator`: core's coordinator for makers that may be lost, and with them the samples that they made."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from heapq import heappush
from typing import Any, TypeVar

from rlhf_core.rollout import EpisodeLedger, Group, Lease, RolloutCoordinator

GroupT = TypeVar("GroupT", bound=Group)


@dataclass(frozen=True, slots=True)
class _Held:
    maker: str
    expires: float


class LeasedCoordinator(RolloutCoordinator[GroupT]):
    """A lease ends at its deadline, or when its maker is known to be lost. Its position is then made again."""

    def __init__(
        self, *, lease_seconds: float = 600.0, clock: Callable[[], float] = time.monotonic, **options: Any
    ) -> None:
        super().__init__(**options)
        self._lease_seconds = lease_seconds
        self._clock = clock
        self._held: dict[int, _Held] = {}
        self._leases: deque[tuple[int, _Held]] = deque()
        """In the order in which they end; may name some that have ended."""
        self._last: EpisodeLedger[GroupT] | None = None
        """The episode that was taken last, without its groups."""

    def lease_to(self, maker: str, count: int) -> list[Lease]:
        """Lease up to `count` positions to `maker`."""
        self._expire()
        leases = self.lease(count)
        for lease in leases:
            held = _Held(maker, self._clock() + self._lease_seconds)
            self._held[lease.position] = held
            self._leases.append((lease.position, held))
        return leases

    def submit(self, group: GroupT, *, keep: bool = True, success: float | None = None) -> bool:
        self._held.pop(group.position, None)
        return super().submit(group, keep=keep, success=success)

    def take(self, episode: int) -> list[GroupT]:
        last = self._open.get(episode)
        groups = super().take(episode)
        assert last is not None
        last.accepted = {}
        self._last = last
        return groups

    def give_back(self, groups: Iterable[GroupT], lost: Iterable[int]) -> None:
        """Undo the last `take`, whose groups at the positions `lost` cannot be had any more: they are made again."""
        assert self._last is not None
        self._taken -= 1
        self._last.accepted = {group.position: group for group in groups}
        self._open[self._taken], self._last = self._last, None
        self._make_again(self._taken, lost)

    def withdraw(self, is_lost: Callable[[GroupT], bool]) -> int:
        """Have groups that arrived, and cannot be had any more, made again; returns how many."""
        count = 0
        for index, episode in self._open.items():
            lost = [position for position, group in episode.accepted.items() if is_lost(group)]
            self._make_again(index, lost)
            count += len(lost)
        return count

    def release(self, maker: str) -> int:
        """End all leases of a maker that is lost; returns how many prompts will be made again."""
        lost = [position for position, held in self._held.items() if held.maker == maker]
        for position in lost:
            self._end_lease(position)
        return len(lost)

    def num_leases(self) -> Counter[str]:
        """Maker -> prompts that it has in the making."""
        return Counter(held.maker for held in self._held.values())

    def progress(self, episode: int) -> str:
        state = self._open.get(episode)
        waiting = () if state is None else sorted(state.outstanding)
        held = [f"{p} at {self._held[p].maker}" for p in waiting if p in self._held]
        more = f"; in the making: {', '.join(held[:4])}{' …' if len(held) > 4 else ''}" if held else ""
        return f"{super().progress(episode)}{more}"

    def waiting(self) -> Iterator[GroupT]:
        """The groups that have arrived and were not taken yet."""
        return (group for episode in self._open.values() for group in episode.accepted.values())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._held = {}
        self._leases.clear()
        super().load_state_dict(state)

    def _make_again(self, index: int, positions: Iterable[int]) -> None:
        episode = self._open[index]
        for position in positions:
            del episode.accepted[position]
            episode.outstanding[position] = 1
            self._want(index, [position])

    def _end_lease(self, position: int) -> None:
        del self._held[position]
        self._leased.discard(position)
        heappush(self._unheld, (self._episode_of[position], position))

    def _expire(self) -> None:
        now = self._clock()
        while self._leases and self._leases[0][1].expires <= now:
            position, held = self._leases.popleft()
            if self._held.get(position) is held:
                self._end_lease(position)
