"""What feeds the loop of `PPOTrainer`: collect steps fill a buffer, update steps go over it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from rlhf_core.batching import collate, split
from rlhf_core.errors import UserInputError
from rlhf_core.rng import permutation
from rlhf_core.sources import BatchPlan, RolloutSource, TrainBatch
from rlhf_core.strategy import Strategy
from rlhf_core.trainer import EpisodeBatches
from rlhf_core.types import BufferItem, Experience, MadeEpisode, PhaseTimes, RolloutGroup


class CollectedEpisodes:
    """An `ExperienceChannel`: every rank collects from its own prompts, then all exchange what they have."""

    def __init__(
        self,
        collect: Callable[[int], Experience],
        *,
        num_collect_steps: int,
        batch_size: int,
        buffer_limit: int,
        take_times: Callable[[], PhaseTimes],
        strategy: Strategy,
    ) -> None:
        """`buffer_limit` counts batches of `batch_size` samples on this rank; 0 is no limit."""
        self._collect = collect
        self._num_collect_steps = num_collect_steps
        self._batch_size = batch_size
        self._buffer_limit = buffer_limit
        self._take_times = take_times
        self._strategy = strategy

    def episode(self, index: int) -> MadeEpisode:
        """Collect. Raises `UserInputError` when the buffer cannot hold it: a sample that was made is never dropped."""
        buffer: list[BufferItem] = []
        for step in range(self._num_collect_steps):
            buffer += split(self._collect(step))
            if 0 < self._buffer_limit * self._batch_size < len(buffer):
                raise UserInputError(
                    f"{len(buffer)} samples are collected, more than {self._buffer_limit} batches of "
                    f"{self._batch_size}",
                    where="PPOTrainer.buffer_limit",
                    hint="raise buffer_limit (0 is no limit), or lower fit's num_collect_steps",
                )
        items = [item for part in self._strategy.all_gather_objects(buffer) for item in part]
        groups: dict[int, list[BufferItem]] = defaultdict(list)
        for item in items:
            groups[item.group_id].append(item)
        return MadeEpisode(
            groups=[RolloutGroup(position=p, rollouts=(), items=tuple(groups[p])) for p in sorted(groups)],
            times=self._take_times(),
        )

    def published(self, version: int) -> None:
        """Nothing waits for a version: the next episode is collected when the loop asks for it."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing is kept between episodes."""

    def close(self) -> None:
        """Nothing is held open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomBatches(BatchPlan):
    """`sample_buffer`: an update step draws one batch from the buffer instead of going over all of it."""

    seed: int

    def batches(
        self, items: Sequence[Any], masked: Callable[[Any], Any], gap_version: int | None
    ) -> Iterator[Iterator[TrainBatch]]:
        for step in range(self.epochs_per_episode):
            # Sample ids never come back in a run, so the first one names the episode.
            order = permutation(len(items), self.seed, "sample-buffer", items[0].sample_id, step)
            drawn = [items[index] for index in order[: self.train_batch_size]]
            mine = drawn[self.rank :: self.world_size] or [masked(drawn[0])]
            yield iter([TrainBatch(mine, gap_version if step == 0 else None)])


class ExperienceSource:
    """A `BatchSource` of whole `Experience`s over core's `RolloutSource`: what the seed's steps and callbacks get."""

    def __init__(self, source: RolloutSource, *, device: torch.device | None) -> None:
        """`device`: where the episode's samples wait for their batches; None leaves them on the CPU."""
        self._source = source
        self._device = device
        self.gap_version: int | None = None
        """Of the batch yielded last: the version to measure the log-prob gap of, on an episode's first one only."""

    def episode(self, index: int) -> EpisodeBatches[Experience]:
        made = self._source.episode(index)
        placed: dict[int, BufferItem] = {}
        return EpisodeBatches((self._pass(batches, placed) for batches in made.epochs), made.metrics)

    def _pass(self, batches: Any, placed: dict[int, BufferItem]) -> Iterator[Experience]:
        for batch in batches:
            self.gap_version = batch.gap_version
            yield collate([self._place(item, placed) for item in batch.items])

    def _place(self, item: BufferItem, placed: dict[int, BufferItem]) -> BufferItem:
        """The item on the buffer's device, moved there once in an episode."""
        if self._device is None:
            return item
        if not bool(item.action_mask.any()):
            return to_device(item, self._device)  # a stand-in that shares its sample's id
        if item.sample_id not in placed:
            placed[item.sample_id] = to_device(item, self._device)
        return placed[item.sample_id]


def to_device(item: BufferItem, device: torch.device) -> BufferItem:
    """The same sample with its tensors on `device`."""
    moved: dict[str, Any] = {}
    for field in fields(item):
        value = getattr(item, field.name)
        if isinstance(value, torch.Tensor):
            moved[field.name] = value.to(device)
    return replace(item, **moved)
