"""`LeasedCoordinator`: core's coordinator for makers that may be lost, and with them the samples that they made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from rlhf_core.rollout import EpisodeLedger, Group, Lease, RolloutCoordinator

GroupT = TypeVar("GroupT", bound=Group)


class LeasedCoordinator(RolloutCoordinator[GroupT]):
    """A lease ends when its maker is lost, or taken for lost. Its position is then made again."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._held: dict[int, str] = {}
        """Position -> the maker that has it in the making."""
        self._last: EpisodeLedger[GroupT] | None = None
        """The episode that was taken last, without its groups."""

    def lease_to(self, maker: str, count: int) -> list[Lease]:
        """Lease up to `count` positions to `maker`."""
        leases = self.lease(count)
        self._held |= {lease.position: maker for lease in leases}
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
        lost = [position for position, holder in self._held.items() if holder == maker]
        for position in lost:
            del self._held[position]
            self._want(self._episode_of[position], [position])
        return len(lost)

    def progress(self, episode: int) -> str:
        state = self._open.get(episode)
        waiting = () if state is None else sorted(state.outstanding)
        held = [f"{p} at {self._held[p]}" for p in waiting if p in self._held]
        more = f"; in the making: {', '.join(held[:4])}{' …' if len(held) > 4 else ''}" if held else ""
        return f"{super().progress(episode)}{more}"

    def waiting(self) -> Iterator[GroupT]:
        """The groups that have arrived and were not taken yet."""
        return (group for episode in self._open.values() for group in episode.accepted.values())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._held = {}
        super().load_state_dict(state)

    def _make_again(self, index: int, positions: Iterable[int]) -> None:
        episode = self._open[index]
        for position in positions:
            del episode.accepted[position]
            episode.outstanding[position] = 1
            self._want(index, [position])
