"""`StoredEpisode`: an episode whose samples each rank fetches for itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlhf_core.rollout import SamplesLost
from rlhf_core.strategy import Strategy
from rlhf_core.types import BufferItem, Rollout

from .sample_store import StoredGroup, fetch_items, fetch_rollouts, summaries, without_collections


class StoredEpisode:
    """The `EpisodeData` of groups in the object store."""

    def __init__(
        self,
        groups: Sequence[StoredGroup],
        strategy: Strategy,
        *,
        give_back: Callable[[list[int]], None],
        timeout_seconds: float,
    ) -> None:
        """give_back: called on rank 0 with the positions of groups that are lost. timeout_seconds: of a fetch."""
        self._groups = groups
        self._strategy = strategy
        self._give_back = give_back
        self._timeout_seconds = timeout_seconds
        with without_collections():
            found = [
                (summary, (index, row))
                for index, group in enumerate(groups)
                for row, summary in enumerate(summaries(group))
            ]
        found.sort(key=lambda each: (each[0].sample_id, each[0].branch))
        self.rows = [summary for summary, _ in found]
        self._places = [place for _, place in found]

    def load(self, rows: Sequence[int], texts: Sequence[int]) -> tuple[list[BufferItem], list[Rollout]]:
        wait = self._timeout_seconds
        places, told = [self._places[row] for row in rows], [self._places[row] for row in texts]
        wanted = {place: self.rows[row] for place, row in zip(places, rows, strict=True)}
        items, lost = fetch_items(self._groups, wanted, timeout_seconds=wait)
        of_groups = list(dict.fromkeys(index for index, _ in told))
        rollouts, without = fetch_rollouts(self._groups, of_groups, timeout_seconds=wait)
        import torch

        here = torch.zeros(len(self._groups))
        here[list(lost | without)] = 1.0
        missing = self._strategy.all_reduce(here, "max").nonzero()[:, 0].tolist()
        if missing:
            positions = [self._groups[index].position for index in missing]
            self._strategy.run_on_main(lambda: self._give_back(positions))
            raise SamplesLost(
                f"those of {len(positions)} prompts went with the process that made them, and are made again",
                where="rollout",
            )
        return [items[place] for place in places], [rollouts[index][row] for index, row in told]
