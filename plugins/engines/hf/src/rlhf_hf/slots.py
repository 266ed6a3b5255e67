"""Continuous batching: a finished row leaves at once, and a waiting prompt takes its slot."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from .cache import Layers
from .prefixes import PrefixStore
from .rows import Row, sample
from .slot_model import SlotModel

REFILL_SHARE = 8
"""Waiting prompts enter once one slot in this many is free: a prefill of one prompt costs nearly a whole step."""

MAX_PADDING = 0.15
"""Share of a prefill that may be padding..."""
FREE_PADDING = 128
"""...or this many tokens, which cost a small model less time than a separate call."""
MAX_LENGTHS = 8
"""Different lengths in a batch: logits are computed at each of them for every row."""


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Prompts that were computed together: what their rows begin from."""

    keys: Sequence[int]
    """Their prompt keys."""
    logits: Tensor
    """[B, V] behind each prompt."""
    layers: Layers

    def only(self, wanted: Container[int]) -> Prefilled:
        """A copy of those with `wanted` keys, so that nothing else keeps its memory."""
        kept = [index for index, key in enumerate(self.keys) if key in wanted]
        if len(kept) == len(self.keys):
            return self
        layers = [(keys[kept], values[kept]) for keys, values in self.layers]
        return Prefilled([self.keys[index] for index in kept], self.logits[kept], layers)


class SlotBatch:
    """Decodes as many rows at once as there are slots; waiting ones take the slots of those that finish."""

    def __init__(self, model: SlotModel, prefill_batch_tokens: int, prefixes: PrefixStore, num_ahead: int) -> None:
        """num_ahead: waiting prompts that are computed and kept before there are slots for them, at least 1."""
        self._model = model
        self._prefill_batch_tokens = prefill_batch_tokens
        self._prefixes = prefixes
        self._num_ahead = num_ahead
        self._active: list[Row] = []
        """The row in each used slot."""
        self._held: list[Prefilled] = []
        """Prompts of the rows that wait next."""

    @property
    def busy(self) -> bool:
        return bool(self._active)

    def takes(self, waiting: Sequence[Row]) -> bool:
        """Whether the first may enter: slots cannot grow beyond the bound on the cache, nor take a model's inputs."""
        return bool(waiting) and self._fits(waiting[0])

    def _fits(self, row: Row) -> bool:
        return not row.request.inputs and self._model.cache.may_hold(len(row.prompt_ids) + row.limit)

    def drop(self, row: Row) -> None:
        """Decode it no further."""
        row.finish_reason = "length"
        self._leave()

    def weights_changed(self) -> None:
        """Forget what was computed for rows to come. Those in slots go on from their own keys and values."""
        self._held.clear()

    def step(self, waiting: deque[Row]) -> list[Row]:
        """Run one pass, in which some of `waiting` may enter; return the rows that it finished."""
        free = self._model.num_slots - len(self._active)
        enough = min(len(waiting), max(1, self._model.num_slots // REFILL_SHARE))
        enters = self.takes(waiting) and (not self._active or free >= enough)
        finished = self._admit(waiting, free) if enters else self._decode()
        if finished:
            self._leave()
        return finished

    def _admit(self, waiting: deque[Row], free: int) -> list[Row]:
        """Fill the free slots and sample the first token of each new row."""
        new: list[Row] = []
        while len(new) < free and self.takes(waiting):
            new.append(waiting.popleft())
        slots: dict[int, list[int]] = {}
        for slot, row in enumerate(new, start=len(self._active)):
            slots.setdefault(row.prompt_key, []).append(slot)
        self._active.extend(new)
        held = {key for batch in self._held for key in batch.keys}
        coming = self._coming(waiting)
        fresh = {key: self._active[where[0]] for key, where in slots.items() if key not in held}
        if fresh:
            fresh |= {key: row for key, row in coming.items() if key not in held and key not in fresh}
        for row in (*new, *fresh.values()):
            self._model.cache.admit(len(row.prompt_ids) + row.limit)
        logits: dict[int, Tensor] = {}
        kept = []
        for batch in chain(self._held, self._compute(list(fresh.values()))):
            self._fill(slots, batch)
            logits.update(zip(batch.keys, batch.logits, strict=True))
            kept.append(batch.only(coming))
        self._held = [batch for batch in kept if batch.keys]
        return sample(torch.stack([logits[row.prompt_key] for row in new]), new)

    def _coming(self, waiting: Sequence[Row]) -> dict[int, Row]:
        """Prompt key -> first row of each of the next prompts that wait, as many as may be kept."""
        found: dict[int, Row] = {}
        for row in waiting:
            if len(found) == self._num_ahead or not self._fits(row):
                break
            found.setdefault(row.prompt_key, row)
        return found

    def _compute(self, rows: Sequence[Row]) -> Iterator[Prefilled]:
        """The prompts of `rows`, all different, but for what earlier turns left."""
        known = {row: prefix for row in rows if (prefix := self._prefixes.longest(row.prompt_ids)) is not None}
        for row in rows:
            row.num_computed = len(row.prompt_ids) - (known[row].num_tokens if row in known else 0)
        plain = [row for row in rows if row not in known]
        for together in self._planned(plain):
            yield Prefilled(_keys(together), *self._model.prefill([row.prompt_ids for row in together]))
        for together in self._planned(list(known)):
            prefixes = [known[row] for row in together]
            suffixes = [row.prompt_ids[known[row].num_tokens :] for row in together]
            yield Prefilled(_keys(together), *self._model.extend(prefixes, suffixes))

    def _planned(self, rows: Sequence[Row]) -> Iterator[list[Row]]:
        for group in plan_prefill([row.num_computed for row in rows], self._prefill_batch_tokens):
            yield [rows[index] for index in group]

    def _fill(self, slots: Mapping[int, Sequence[int]], batch: Prefilled) -> None:
        copies = [(slot, index) for index, key in enumerate(batch.keys) for slot in slots.get(key, ())]
        if copies:
            self._model.cache.fill([slot for slot, _ in copies], batch.layers, [index for _, index in copies])

    def _decode(self) -> list[Row]:
        rows = self._active
        return sample(self._model.decode([row.token_ids[-1] for row in rows], [row.num_cached for row in rows]), rows)

    def _leave(self) -> None:
        """Remove finished rows, filling the gaps with rows from the end; keep what their next turns may use."""
        for slot, row in enumerate(self._active):
            prefix = None if row.finish_reason is None else row.prefix
            if prefix is not None and self._prefixes.may_hold(len(prefix)):
                self._prefixes.put(prefix, self._model.cache.read(slot, len(prefix)))
        count = sum(row.finish_reason is None for row in self._active)
        holes = [slot for slot, row in enumerate(self._active[:count]) if row.finish_reason is not None]
        movers = [slot for slot, row in enumerate(self._active) if slot >= count and row.finish_reason is None]
        if movers:
            longest = max(self._active[slot].num_cached for slot in movers)
            self._model.cache.copy_rows(movers, holes, longest)
            for mover, hole in zip(movers, holes, strict=True):
                self._active[hole] = self._active[mover]
        del self._active[count:]


def _keys(rows: Sequence[Row]) -> list[int]:
    return [row.prompt_key for row in rows]


def plan_prefill(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices into `lengths`, grouped so that each group pads to its longest prompt with little waste.

    A group holds at most `max_tokens` tokens, padding included, or one prompt.
    """
    groups: list[list[int]] = []
    group: list[int] = []
    used = 0
    distinct: set[int] = set()
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        length = lengths[index]
        padded = length * (len(group) + 1)
        fits = (
            padded <= max_tokens
            and padded - used - length <= max(FREE_PADDING, MAX_PADDING * padded)
            and (length in distinct or len(distinct) < MAX_LENGTHS)
        )
        if group and not fits:
            groups.append(group)
            group, used, distinct = [], 0, set()
        group.append(index)
        used += length
        distinct.add(length)
    if group:
        groups.append(group)
    return groups
