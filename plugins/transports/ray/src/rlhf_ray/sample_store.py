"""Samples on their way from a maker to the ranks that train on them: what is said of them, and where they are.

Tokens and texts go from the maker to Ray's object store, and from there only to the process that asks for them. What a
coordinator handles of a group is `StoredGroup`: a summary of each row as bytes, and where the rest of it is. Each rank
fetches the rows that it computes or trains on, so an object holds few rows where they are large.
"""

from __future__ import annotations

import contextlib
import copyreg
import gc
import io
import logging
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from rlhf_core.rollout import SamplesLost
from rlhf_core.types import BufferItem, ItemSummary, Rollout, RolloutGroup

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf_core.strategy import Strategy

logger = logging.getLogger("rlhf.ray")

_OBJECT_BYTES = 2 * 1024 * 1024
"""An object is full from here on. Smaller ones cost more than they save; larger ones bring rows nobody asked for."""

Place = tuple[Any, int]
"""Reference to an object, and the index of a row in it."""


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A group whose samples are in the object store. Lost with the process of its owner."""

    position: int
    is_empty: bool
    owner: str
    """Name of the actor that made it."""
    summaries: bytes
    """See `summaries`."""
    items: tuple[Place, ...]
    """Of each row."""
    texts: tuple[Place, ...]
    """Of each row's rollout; empty where texts are not kept."""
    token_bytes: int
    text_bytes: int
    keep: bool
    """Whether it is trained on; the algorithm rejects others, which are replaced."""
    success: float | None = None
    """The judgement of the run's sampler."""


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Make many objects at once, none of which is garbage: Python would search them for cycles again and again.

    That took a third of the time in which a rank unpacked its samples (`benchmarks/coordinator.py`).
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@without_collections()
def store_groups(groups: Sequence[RolloutGroup], owner: str, *, texts: bool) -> list[StoredGroup]:
    """Put the groups' items, and with `texts` their rollouts, into the object store."""
    items = [[_packed(item) for item in group.items] for group in groups]
    told = [[_packed(rollout) for rollout in group.rollouts] if texts else [] for group in groups]
    item_places, text_places = _store(items), _store(told)
    return [
        StoredGroup(
            position=group.position,
            is_empty=group.is_empty,
            owner=owner,
            summaries=pickle.dumps([ItemSummary.of(item) for item in group.items]),
            items=tuple(islice(item_places, len(own))),
            texts=tuple(islice(text_places, len(own_texts))),
            token_bytes=sum(map(len, own)),
            text_bytes=sum(map(len, own_texts)),
            keep=not group.is_empty,
        )
        for group, own, own_texts in zip(groups, items, told, strict=True)
    ]


def summaries(group: StoredGroup) -> list[ItemSummary]:
    """A summary of each row."""
    # From an actor of this run, over Ray, which pickles every message itself; never read from a file.
    found: list[ItemSummary] = pickle.loads(group.summaries)  # noqa: S301
    return found


def fetch(places: Iterable[Place], *, timeout_seconds: float) -> dict[Place, Any]:
    """The item or rollout at each place, in memory of its own; without those that are lost, or do not come in time."""
    wanted = list(dict.fromkeys(places))
    refs = list({ref for ref, _ in wanted})
    there, late = ray.wait(refs, num_returns=len(refs), timeout=timeout_seconds) if refs else ([], [])
    if late:
        logger.warning("samples in %d objects did not come within %g s", len(late), timeout_seconds)
    rows = {}
    for ref in there:
        try:
            rows[ref] = ray.get(ref, timeout=timeout_seconds)
        except RayError as error:
            logger.warning("samples cannot be fetched: %s", str(error).splitlines()[0])
    with without_collections():
        # From an actor of this run, as above.
        return {(ref, index): pickle.loads(rows[ref][index]) for ref, index in wanted if ref in rows}  # noqa: S301


def fetch_groups(
    groups: Sequence[StoredGroup], *, timeout_seconds: float
) -> tuple[list[RolloutGroup], list[StoredGroup]]:
    """The whole groups, and those that are lost."""
    found = fetch([place for group in groups for place in group.items + group.texts], timeout_seconds=timeout_seconds)
    whole, lost = [], []
    for group in groups:
        if found.keys() >= set(group.items + group.texts):
            rollouts = tuple(found[place] for place in group.texts)
            items = tuple(found[place] for place in group.items)
            whole.append(RolloutGroup(position=group.position, rollouts=rollouts, items=items))
        else:
            lost.append(group)
    return whole, lost


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
        self._rows = [place for _, place in found]

    def load(self, rows: Sequence[int], texts: Sequence[int]) -> tuple[list[BufferItem], list[Rollout]]:
        import torch

        items = [(index, self._groups[index].items[row]) for index, row in (self._rows[each] for each in rows)]
        told = [(index, self._groups[index].texts[row]) for index, row in (self._rows[each] for each in texts)]
        found = fetch([place for _, place in items + told], timeout_seconds=self._timeout_seconds)
        here = torch.zeros(len(self._groups))
        here[[index for index, place in items + told if place not in found]] = 1.0
        missing = self._strategy.all_reduce(here, "max").nonzero()[:, 0].tolist()
        if missing:
            positions = [self._groups[index].position for index in missing]
            self._strategy.run_on_main(lambda: self._give_back(positions))
            raise SamplesLost(
                f"those of {len(positions)} prompts went with the process that made them, and are made again",
                where="rollout",
            )
        return [found[place] for _, place in items], [found[place] for _, place in told]


def _store(groups: Sequence[Sequence[bytes]]) -> Iterator[Place]:
    """Put all rows into objects; the place of each, in order."""
    places: list[Place] = []
    held: list[bytes] = []
    size = 0
    rows = list(chain.from_iterable(groups))
    for number, row in enumerate(rows, start=1):
        held.append(row)
        size += len(row)
        if size >= _OBJECT_BYTES or number == len(rows):
            ref = ray.put(held)
            places += [(ref, index) for index in range(len(held))]
            held, size = [], 0
    return iter(places)


def _packed(value: BufferItem | Rollout) -> bytes:
    """With tensors as arrays, which are pickled at the speed of memory."""
    from torch import Tensor

    body = io.BytesIO()
    pickler = pickle.Pickler(body, protocol=5)
    pickler.dispatch_table = copyreg.dispatch_table | {Tensor: _as_array}
    pickler.dump(value)
    return body.getvalue()


def _as_array(tensor: Tensor) -> tuple[Any, tuple[Any]]:
    import torch

    return torch.from_numpy, (tensor.detach().cpu().numpy(),)
