"""`LeasedCoordinator`: core's coordinator for makers that may be lost, and with them the samples that they made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rlhf_core.rollout import RolloutCoordinator

from .sample_store import StoredGroup


class LeasedCoordinator(RolloutCoordinator[StoredGroup]):
    """A lease ends when its maker is lost, or taken for lost. Its position is then made again."""

    _last: Any = None
    """Ledger of the episode that was taken last, without its groups."""

    def take(self, episode: int) -> list[StoredGroup]:
        last = self._open.get(episode)
        groups = super().take(episode)
        assert last is not None
        last.accepted = {}
        self._last = last
        return groups

    def give_back(self, groups: Iterable[StoredGroup], lost: Iterable[int]) -> None:
        """Undo the last `take`, whose groups at the positions `lost` cannot be had any more: they are made again."""
        self._taken -= 1
        self._last.accepted = {group.position: group for group in groups}
        self._open[self._taken], self._last = self._last, None
        self._make_again(self._taken, lost)

    def withdraw(self, is_lost: Callable[[StoredGroup], bool]) -> int:
        """Have groups that arrived, and cannot be had any more, made again; returns how many."""
        count = 0
        for index, episode in self._open.items():
            lost = [position for position, group in episode.accepted.items() if is_lost(group)]
            self._make_again(index, lost)
            count += len(lost)
        return count

    def release(self, maker: str) -> int:
        """End all leases of a maker that is lost; returns how many prompts will be made again."""
        count = 0
        for episode in self._open.values():
            lost = [position for position, holder in episode.outstanding.items() if holder == maker]
            episode.outstanding.update(dict.fromkeys(lost))
            count += len(lost)
        return count

    def progress(self, episode: int) -> str:
        state = self._open.get(episode)
        held = [] if state is None else [f"{p} at {maker}" for p, maker in sorted(state.outstanding.items()) if maker]
        more = f"; in the making: {', '.join(held[:4])}{' …' if len(held) > 4 else ''}" if held else ""
        return f"{super().progress(episode)}{more}"

    def waiting(self) -> Iterator[StoredGroup]:
        """The groups that have arrived and were not taken yet."""
        return (group for episode in self._open.values() for group in episode.accepted.values())

    def _make_again(self, index: int, positions: Iterable[int]) -> None:
        episode = self._open[index]
        for position in positions:
            del episode.accepted[position]
            episode.outstanding[position] = None
