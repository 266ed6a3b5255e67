"""Episodes of samples that are in this process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..errors import RlhfError
from ..types import BufferItem, ItemSummary, MadeEpisode, PhaseTimes, Rollout


class SamplesLost(RlhfError):
    """Samples of an episode were lost before they were trained on, and are made again."""


def made_episode(
    items: Iterable[BufferItem],
    times: PhaseTimes,
    *,
    rollouts: Iterable[Rollout] = (),
    metrics: Mapping[str, float] | None = None,
) -> MadeEpisode:
    """The episode of samples that this process holds, in any order. `rollouts`: their texts, where these are kept."""
    data = _Held(items, rollouts)
    return MadeEpisode(
        rows=[ItemSummary.of(item) for item in data.items], data=data, times=times, metrics=metrics or {}
    )


class _Held:
    def __init__(self, items: Iterable[BufferItem], rollouts: Iterable[Rollout]) -> None:
        self.items = sorted(items, key=lambda item: (item.sample_id, item.branch))
        self._rollouts = {(rollout.sample_id, rollout.branch): rollout for rollout in rollouts}

    def load(self, rows: Sequence[int], texts: Sequence[int]) -> tuple[list[BufferItem], list[Rollout]]:
        told = [self.items[row] for row in texts]
        return [self.items[row] for row in rows], [self._rollouts[item.sample_id, item.branch] for item in told]
