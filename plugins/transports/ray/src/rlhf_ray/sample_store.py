"""Transfer of samples from a maker to the ranks that train on them.

Tokens and texts go from the maker to Ray's object store, and from there only to the process that fetches them. The
coordinator handles only a `StoredGroup`: a summary of each row as bytes, and the location of its data. Each rank
fetches the rows that it computes or trains on, so an object holds few rows if they are large.
"""

from __future__ import annotations

import contextlib
import copyreg
import gc
import io
import logging
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import chain, islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from rlhf_core.rollout import SamplesLost
from rlhf_core.types import BufferItem, ItemSummary, Rollout, RolloutGroup

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from rlhf_core.strategy import Strategy

logger = logging.getLogger("rlhf.ray")

_OBJECT_BYTES = 2 * 1024 * 1024
"""Size at which an object is full. Smaller objects add overhead, and larger ones transfer rows that are not needed."""

_FIELDS = [field.name for field in fields(ItemSummary)]
_values = attrgetter(*_FIELDS)
# Every rank unpacks the summaries of all rows. Setting the slots takes a third of the time of pickle's own way.
_SETTERS = [getattr(ItemSummary, name).__set__ for name in _FIELDS]

RowLocation = tuple[Any, int, int]
"""Reference to an object, the index of some rows in it that were packed together, and the index of a row in these."""


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """Group whose samples are in the object store. They are lost with the process of the owner."""

    position: int
    is_empty: bool
    owner: str
    """Name of the actor that created it."""
    summaries: bytes
    """See `summaries`."""
    items: tuple[RowLocation, ...]
    """Location of each row."""
    texts: tuple[RowLocation, ...]
    """Location of each row's rollout. Empty if texts are not kept."""
    token_bytes: int
    """Size of the packed items, including inputs of their prompt, such as pixels."""
    text_bytes: int
    keep: bool
    """Whether it is used for training. Groups that the algorithm rejects are replaced."""
    success: float | None = None
    """Judgment of the run's sampler. None without one."""


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Pause garbage collection while many live objects are created, which Python would search for cycles repeatedly.

    That took a third of the time in which a rank unpacked its samples (`benchmarks/coordinator.py`).
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@gc_paused()
def store_groups(groups: Sequence[RolloutGroup], owner: str, *, texts: bool) -> list[StoredGroup]:
    """Put groups into the object store.

    Args:
        groups: Groups of this process.
        owner: Name of this actor.
        texts: Whether to store the rollouts in addition to the items.

    Returns:
        A description of each group.
    """
    items = [_pack_items(group.items) for group in groups]
    rollouts = [[_pack([rollout]) for rollout in group.rollouts] if texts else [] for group in groups]
    item_locations, text_locations = _store(items), _store(rollouts)
    return [
        StoredGroup(
            position=group.position,
            is_empty=group.is_empty,
            owner=owner,
            summaries=pickle.dumps([_values(ItemSummary.of(item)) for item in group.items]),
            items=_row_locations([*islice(item_locations, len(own))], len(group.items)),
            texts=_row_locations([*islice(text_locations, len(own_texts))], len(own_texts)),
            token_bytes=sum(map(len, own)),
            text_bytes=sum(map(len, own_texts)),
            keep=not group.is_empty,
        )
        for group, own, own_texts in zip(groups, items, rollouts, strict=True)
    ]


def summaries(group: StoredGroup) -> list[ItemSummary]:
    """Unpack the summaries of a group's rows."""
    rows = []
    # Sent by an actor of this run over Ray, which pickles every message itself. Never read from a file.
    for values in pickle.loads(group.summaries):  # noqa: S301
        row = ItemSummary.__new__(ItemSummary)
        for set_field, value in zip(_SETTERS, values, strict=True):
            set_field(row, value)
        rows.append(row)
    return rows


def fetch(locations: Iterable[RowLocation], *, timeout_seconds: float) -> dict[RowLocation, Any]:
    """Fetch items or rollouts into this process's memory.

    Args:
        locations: Locations of the rows.
        timeout_seconds: Maximum wait.

    Returns:
        Location -> item or rollout, without those that were lost or did not arrive in time.
    """
    wanted = list(dict.fromkeys(locations))
    refs = list({ref for ref, _, _ in wanted})
    ready, late = ray.wait(refs, num_returns=len(refs), timeout=timeout_seconds) if refs else ([], [])
    if late:
        logger.warning("samples in %d objects did not arrive within %g s", len(late), timeout_seconds)
    objects = {}
    for ref in ready:
        try:
            objects[ref] = ray.get(ref, timeout=timeout_seconds)
        except RayError as error:
            logger.warning("samples cannot be fetched: %s", str(error).splitlines()[0])
    with gc_paused():
        packs = dict.fromkeys((ref, index) for ref, index, _ in wanted if ref in objects)
        # Sent by an actor of this run, as above.
        rows = {(ref, index): pickle.loads(_bytes_of(objects[ref], index)) for ref, index in packs}  # noqa: S301
        return {(ref, index, place): rows[ref, index][place] for ref, index, place in wanted if ref in objects}


def fetch_groups(
    groups: Sequence[StoredGroup], *, timeout_seconds: float
) -> tuple[list[RolloutGroup], list[StoredGroup]]:
    """Fetch whole groups. Returns the complete groups, and the descriptions of lost groups."""
    rows = fetch([place for group in groups for place in group.items + group.texts], timeout_seconds=timeout_seconds)
    whole, lost = [], []
    for group in groups:
        if rows.keys() >= set(group.items + group.texts):
            rollouts = tuple(rows[place] for place in group.texts)
            items = tuple(rows[place] for place in group.items)
            whole.append(RolloutGroup(position=group.position, rollouts=rollouts, items=items))
        else:
            lost.append(group)
    return whole, lost


class StoredEpisode:
    """`EpisodeData` of groups in the object store."""

    def __init__(
        self,
        groups: Sequence[StoredGroup],
        strategy: Strategy,
        *,
        give_back: Callable[[list[int]], None],
        timeout_seconds: float,
    ) -> None:
        """Sort the rows of the groups by sample id and branch.

        Args:
            groups: Groups of the episode.
            strategy: Strategy whose ranks fetch the rows.
            give_back: Called on rank 0 with the positions of lost groups.
            timeout_seconds: Maximum duration of a fetch.
        """
        self._groups = groups
        self._strategy = strategy
        self._give_back = give_back
        self._timeout_seconds = timeout_seconds
        with gc_paused():
            rows = [
                (summary, (index, row))
                for index, group in enumerate(groups)
                for row, summary in enumerate(summaries(group))
            ]
        rows.sort(key=lambda each: (each[0].sample_id, each[0].branch))
        self.rows = [summary for summary, _ in rows]
        self._rows = [place for _, place in rows]

    def load(self, rows: Sequence[int], texts: Sequence[int]) -> tuple[list[BufferItem], list[Rollout]]:
        """Fetch rows and texts. Collective: raises `SamplesLost` on all ranks if samples of any rank are lost."""
        import torch

        items = [(index, self._groups[index].items[row]) for index, row in (self._rows[each] for each in rows)]
        rollouts = [(index, self._groups[index].texts[row]) for index, row in (self._rows[each] for each in texts)]
        fetched = fetch([place for _, place in items + rollouts], timeout_seconds=self._timeout_seconds)
        is_missing = torch.zeros(len(self._groups))
        is_missing[[index for index, place in items + rollouts if place not in fetched]] = 1.0
        missing = self._strategy.all_reduce(is_missing, "max").nonzero()[:, 0].tolist()
        if missing:
            positions = [self._groups[index].position for index in missing]
            self._strategy.run_on_main(lambda: self._give_back(positions))
            raise SamplesLost(
                f"samples of {len(positions)} prompts were lost with their process and are generated again",
                where="rollout",
            )
        return [fetched[place] for _, place in items], [fetched[place] for _, place in rollouts]


def _pack_items(items: Sequence[BufferItem]) -> list[bytes]:
    """Pack each item for itself, or all of them if they share inputs of their prompt, which are then packed once."""
    if any(item.columns.model_inputs for item in items):
        return [_pack(items)]
    return [_pack([item]) for item in items]


def _row_locations(packs: Sequence[tuple[Any, int]], num_rows: int) -> tuple[RowLocation, ...]:
    """Return the location of each of a group's rows, from those of its packs."""
    if len(packs) == num_rows:
        return tuple((ref, index, 0) for ref, index in packs)
    ((ref, index),) = packs
    return tuple((ref, index, place) for place in range(num_rows))


def _store(groups: Sequence[Sequence[bytes]]) -> Iterator[tuple[Any, int]]:
    """Put all packs into objects. Iterates over the object and the index of each pack, in order."""
    import numpy as np

    locations: list[tuple[Any, int]] = []
    held: list[bytes] = []
    ends = [0]
    rows = list(chain.from_iterable(groups))
    for number, row in enumerate(rows, start=1):
        held.append(row)
        ends.append(ends[-1] + len(row))
        if ends[-1] >= _OBJECT_BYTES or number == len(rows):
            # An array is mapped by its readers, while a list of bytes would be copied whole for each of them.
            ref = ray.put((np.frombuffer(b"".join(held), np.uint8), ends))
            locations += [(ref, index) for index in range(len(held))]
            held, ends = [], [0]
    return iter(locations)


def _bytes_of(stored: tuple[np.ndarray[Any, Any], Sequence[int]], index: int) -> memoryview:
    """The bytes of one pack of an object of `_store`, in shared memory."""
    body, ends = stored
    return body.data[ends[index] : ends[index + 1]]


def _pack(rows: Sequence[BufferItem | Rollout]) -> bytes:
    """Pickle rows with tensors as arrays, which are pickled at memory speed. A tensor of several rows is one array."""
    from torch import Tensor

    body = io.BytesIO()
    pickler = pickle.Pickler(body, protocol=5)
    pickler.dispatch_table = copyreg.dispatch_table | {Tensor: _reduce_to_array}
    pickler.dump(rows)
    return body.getvalue()


def _reduce_to_array(tensor: Tensor) -> tuple[Any, tuple[Any]]:
    import torch

    return torch.from_numpy, (tensor.detach().cpu().numpy(),)
