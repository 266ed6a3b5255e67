"""Samples on their way from a maker to the ranks that train on them: what is said of them, and where they are.

Tokens and texts go from the maker to Ray's object store, and from there only to the process that asks for them. What a
coordinator handles of a group is `StoredGroup`: a summary of each row as bytes, and references. Each rank fetches the
rows that it computes or trains on, so an object holds few rows where they are large.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import pickle
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from rlhf_core.rollout import SamplesLost
from rlhf_core.types import BufferItem, ItemSummary, Rollout, RolloutGroup

from .groups import item_from_tree, item_to_tree, plain, rollout_from_tree, rollout_to_tree

if TYPE_CHECKING:
    from rlhf_core.strategy import Strategy

logger = logging.getLogger("rlhf.ray")

_OBJECT_BYTES = 2 * 1024 * 1024
"""An object is full from here on. Smaller ones cost more than they save; larger ones bring rows nobody asked for."""


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive rows of a group, in one object."""

    ref: Any
    first: int
    """Index of the group's first row in the object."""
    num_rows: int


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A group whose samples are in the object store. Lost with the process of its owner."""

    position: int
    is_empty: bool
    owner: str
    """Name of the actor that made it."""
    summaries: bytes
    """See `summaries`."""
    parts: tuple[Part, ...]
    """All rows, in order."""
    text: Any
    """Reference to the texts of some groups; None where texts are not kept."""
    text_place: int
    """The group's place among those."""
    token_bytes: int
    text_bytes: int


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
    """Put the groups' tensors, and with `texts` their rollouts, into the object store."""
    packed = [pickle.dumps([rollout_to_tree(each) for each in group.rollouts]) if texts else b"" for group in groups]
    text = ray.put(packed) if texts and groups else None
    rows = [[_packed(item) for item in group.items] for group in groups]
    parts = _store_rows(rows)
    return [
        StoredGroup(
            position=group.position,
            is_empty=group.is_empty,
            owner=owner,
            summaries=pickle.dumps([ItemSummary.of(item) for item in group.items]),
            parts=tuple(parts[place]),
            text=text,
            text_place=place,
            token_bytes=sum(map(len, rows[place])),
            text_bytes=len(packed[place]),
        )
        for place, group in enumerate(groups)
    ]


def summaries(group: StoredGroup) -> list[ItemSummary]:
    """A summary of each row."""
    # From an actor of this run, over Ray, which pickles every message itself; never read from a file.
    found: list[ItemSummary] = pickle.loads(group.summaries)  # noqa: S301
    return found


@without_collections()
def fetch_items(
    groups: Sequence[StoredGroup], rows: Iterable[tuple[int, int]], *, timeout_seconds: float
) -> tuple[dict[tuple[int, int], BufferItem], set[int]]:
    """The items of `rows`, which are named by index of the group and row in the group.

    Also returns the indices of the groups of which something is lost.
    """
    wanted: dict[Any, dict[tuple[int, int], int]] = defaultdict(dict)
    for index, row in rows:
        ref, place = _place(groups[index].parts, row)
        wanted[ref][index, row] = place
    values, lost = _get(list(wanted), timeout_seconds)
    items = {where: _unpacked(values[ref][place]) for ref in values for where, place in wanted[ref].items()}
    return items, {index for ref in lost for index, _ in wanted[ref]}


def fetch_rollouts(
    groups: Sequence[StoredGroup], chosen: Sequence[int], *, timeout_seconds: float
) -> tuple[dict[int, list[Rollout]], set[int]]:
    """Rollouts by index of the group, none where texts are not kept; and the groups of which they are lost."""
    wanted: dict[Any, list[int]] = defaultdict(list)
    for index in chosen:
        if groups[index].text is not None:
            wanted[groups[index].text].append(index)
    values, lost = _get(list(wanted), timeout_seconds)
    rollouts: dict[int, list[Rollout]] = {index: [] for index in chosen} | {
        index: _rollouts(values[ref][groups[index].text_place]) for ref in values for index in wanted[ref]
    }
    return rollouts, {index for ref in lost for index in wanted[ref]}


def fetch_groups(
    groups: Sequence[StoredGroup], *, timeout_seconds: float
) -> tuple[list[RolloutGroup], list[StoredGroup]]:
    """The whole groups, and those that are lost."""
    everything = [
        (index, row) for index, group in enumerate(groups) for row in range(sum(part.num_rows for part in group.parts))
    ]
    items, lost = fetch_items(groups, everything, timeout_seconds=timeout_seconds)
    texts, without = fetch_rollouts(groups, range(len(groups)), timeout_seconds=timeout_seconds)
    lost |= without
    of_group: dict[int, list[BufferItem]] = defaultdict(list)
    for index, row in everything:
        if index not in lost:
            of_group[index].append(items[index, row])
    whole = [
        RolloutGroup(position=group.position, rollouts=tuple(texts[index]), items=tuple(of_group[index]))
        for index, group in enumerate(groups)
        if index not in lost
    ]
    return whole, [groups[index] for index in sorted(lost)]


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
        items, lost = fetch_items(self._groups, places, timeout_seconds=wait)
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


def _store_rows(rows: Sequence[Sequence[bytes]]) -> list[list[Part]]:
    """Put the rows of each group into objects, in order; the parts of each group."""
    parts: list[list[Part]] = [[] for _ in rows]
    held: list[tuple[int, bytes]] = []
    size = 0
    flat = [(place, row) for place, of_group in enumerate(rows) for row in of_group]
    for number, (place, row) in enumerate(flat, start=1):
        held.append((place, row))
        size += len(row)
        if size >= _OBJECT_BYTES or number == len(flat):
            ref = ray.put([row for _, row in held])
            first = 0
            for of, count in Counter(of for of, _ in held).items():  # in order
                parts[of].append(Part(ref, first, count))
                first += count
            held, size = [], 0
    return parts


def _packed(item: BufferItem) -> bytes:
    """An item with its tensors as arrays, which are pickled at the speed of memory."""
    from torch import Tensor

    def array(value: Any) -> Any:
        return value.detach().cpu().numpy() if isinstance(value, Tensor) else value

    return pickle.dumps(plain(item_to_tree(item), array), protocol=5)


def _unpacked(row: bytes) -> BufferItem:
    """The item, in memory of its own."""
    import numpy as np
    import torch

    def tensor(value: Any) -> Any:
        return torch.from_numpy(value) if isinstance(value, np.ndarray) else value

    # From an actor of this run, over Ray, which pickles every message itself; never read from a file.
    return item_from_tree(plain(pickle.loads(row), tensor))  # noqa: S301


def _rollouts(packed: bytes) -> list[Rollout]:
    # From an actor of this run, as above.
    return [rollout_from_tree(tree) for tree in pickle.loads(packed)]  # noqa: S301


def _place(parts: Sequence[Part], row: int) -> tuple[Any, int]:
    """The object that holds a group's row, and the row's place there."""
    for part in parts:
        if row < part.num_rows:
            return part.ref, part.first + row
        row -= part.num_rows
    raise IndexError(row)


def _get(refs: Sequence[Any], timeout_seconds: float) -> tuple[dict[Any, Any], set[Any]]:
    """The objects of the references, and the references whose object is lost or does not come in time."""
    deadline = time.monotonic() + timeout_seconds
    try:
        return dict(zip(refs, ray.get(list(refs), timeout=timeout_seconds), strict=True)), set()
    except (GetTimeoutError, RayError) as error:
        logger.warning("samples cannot be fetched: %s", str(error).splitlines()[0])
    values, lost = {}, set()
    for ref in refs:
        try:
            values[ref] = ray.get(ref, timeout=max(0.0, deadline - time.monotonic()))
        except (GetTimeoutError, RayError):
            lost.add(ref)
    return values, lost
