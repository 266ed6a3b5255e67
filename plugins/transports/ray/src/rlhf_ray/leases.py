"""`LeasedCoordinator`: core's coordinator for makers that may be lost together with their samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rlhf_core.rollout import RolloutCoordinator

from .sample_store import StoredGroup


class LeasedCoordinator(RolloutCoordinator[StoredGroup]):
    """Coordinator whose leases end when their maker is lost or presumed lost. Their prompts are generated again."""

    _last: Any = None
    """Ledger entry of the episode that was taken last, without its groups."""

    def take(self, episode: int) -> list[StoredGroup]:
        """Return the groups of an episode. `give_back` can undo this until the next call."""
        last = self._open.get(episode)
        groups = super().take(episode)
        assert last is not None
        last.accepted = {}
        self._last = last
        return groups

    def give_back(self, groups: Iterable[StoredGroup], lost: Iterable[int]) -> None:
        """Undo the last `take`. Its groups at the positions `lost` no longer exist and are generated again."""
        self._taken -= 1
        self._last.accepted = {group.position: group for group in groups}
        self._open[self._taken], self._last = self._last, None
        self._reopen(self._taken, lost)

    def withdraw(self, is_lost: Callable[[StoredGroup], bool]) -> int:
        """Reopen the positions of arrived groups for which `is_lost` is true, and return their number."""
        count = 0
        for index, episode in self._open.items():
            lost = [position for position, group in episode.accepted.items() if is_lost(group)]
            self._reopen(index, lost)
            count += len(lost)
        return count

    def release(self, maker: str) -> int:
        """End all leases of a lost maker, and return the number of prompts that will be generated again."""
        count = 0
        for episode in self._open.values():
            lost = [position for position, holder in episode.outstanding.items() if holder == maker]
            episode.outstanding.update(dict.fromkeys(lost))
            count += len(lost)
        return count

    def progress(self, episode: int) -> str:
        """Describe the progress of an episode, with its leased prompts and their makers."""
        state = self._open.get(episode)
        held = [] if state is None else [f"{p} at {maker}" for p, maker in sorted(state.outstanding.items()) if maker]
        more = f", in progress: {', '.join(held[:4])}{' …' if len(held) > 4 else ''}" if held else ""
        return f"{super().progress(episode)}{more}"

    def waiting(self) -> Iterator[StoredGroup]:
        """Iterate over groups that have arrived but were not taken yet."""
        return (group for episode in self._open.values() for group in episode.accepted.values())

    def _reopen(self, index: int, positions: Iterable[int]) -> None:
        episode = self._open[index]
        for position in positions:
            del episode.accepted[position]
            episode.outstanding[position] = None
