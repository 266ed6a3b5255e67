"""Continuous batching: a finished row leaves immediately, and a waiting prompt takes its slot."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from .cache import Layers
from .prefixes import PrefixStore
from .rows import DecodingRow, sample
from .slot_model import SlotModel

REFILL_SHARE = 8
"""Waiting prompts enter once 1/REFILL_SHARE of the slots is free: prefilling one prompt costs nearly a full step."""

MAX_PADDING = 0.15
"""Maximum fraction of padding in a prefill, unless the padding is below `FREE_PADDING` tokens."""
FREE_PADDING = 128
"""Number of padding tokens that cost a small model less time than a separate call."""
MAX_LENGTHS = 8
"""Maximum number of distinct lengths in a batch, since logits are computed at each length for every row."""


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Prompts that were computed together, from which their rows start."""

    keys: Sequence[int]
    """Prompt keys."""
    logits: Tensor
    """[B, V] next-token logits of each prompt."""
    layers: Layers

    def select(self, wanted: Container[int]) -> Prefilled:
        """Copy the prompts with `wanted` keys, so that the memory of the others can be freed."""
        kept = [index for index, key in enumerate(self.keys) if key in wanted]
        if len(kept) == len(self.keys):
            return self
        layers = [(keys[kept], values[kept]) for keys, values in self.layers]
        return Prefilled([self.keys[index] for index in kept], self.logits[kept], layers)


class SlotBatch:
    """Decodes one row per slot. Waiting rows take the slots of finished ones."""

    def __init__(self, model: SlotModel, prefill_batch_tokens: int, prefixes: PrefixStore, num_ahead: int) -> None:
        """`num_ahead`: maximum number of waiting prompts prefilled before slots are free for them, at least 1."""
        self._model = model
        self._prefill_batch_tokens = prefill_batch_tokens
        self._prefixes = prefixes
        self._num_ahead = num_ahead
        self._active: list[DecodingRow] = []
        """Row of each used slot."""
        self._prefilled: list[Prefilled] = []
        """Prefilled prompts of the next waiting rows."""

    @property
    def is_busy(self) -> bool:
        return bool(self._active)

    def can_admit(self, waiting: Sequence[DecodingRow]) -> bool:
        """Whether the first waiting row may enter: it fits the cache's limit and is without extra model inputs."""
        return bool(waiting) and self._fits(waiting[0])

    def _fits(self, row: DecodingRow) -> bool:
        return not row.request.inputs and self._model.cache.can_hold(len(row.prompt_ids) + row.limit)

    def drop(self, row: DecodingRow) -> None:
        """Stop decoding a row."""
        row.finish_reason = "length"
        self._remove_finished()

    def weights_changed(self) -> None:
        """Drop prefilled prompts of waiting rows. Rows in slots continue from their own keys and values."""
        self._prefilled.clear()

    def step(self, waiting: deque[DecodingRow]) -> list[DecodingRow]:
        """Run one pass, in which some `waiting` rows may enter, and return the rows that it finished."""
        free = self._model.num_slots - len(self._active)
        enough = min(len(waiting), max(1, self._model.num_slots // REFILL_SHARE))
        enters = self.can_admit(waiting) and (not self._active or free >= enough)
        finished = self._admit(waiting, free) if enters else self._decode()
        if finished:
            self._remove_finished()
        return finished

    def _admit(self, waiting: deque[DecodingRow], free: int) -> list[DecodingRow]:
        """Fill the free slots and sample the first token of each new row."""
        new: list[DecodingRow] = []
        while len(new) < free and self.can_admit(waiting):
            new.append(waiting.popleft())
        slots: dict[int, list[int]] = {}
        for slot, row in enumerate(new, start=len(self._active)):
            slots.setdefault(row.prompt_key, []).append(slot)
        self._active.extend(new)
        known = {key for batch in self._prefilled for key in batch.keys}
        upcoming = self._next_prompts(waiting)
        missing = {key: self._active[where[0]] for key, where in slots.items() if key not in known}
        if missing:
            missing |= {key: row for key, row in upcoming.items() if key not in known and key not in missing}
        for row in (*new, *missing.values()):
            self._model.cache.admit(len(row.prompt_ids) + row.limit)
        logits: dict[int, Tensor] = {}
        kept = []
        for batch in chain(self._prefilled, self._compute(list(missing.values()))):
            self._fill(slots, batch)
            logits.update(zip(batch.keys, batch.logits, strict=True))
            kept.append(batch.select(upcoming))
        self._prefilled = [batch for batch in kept if batch.keys]
        return sample(torch.stack([logits[row.prompt_key] for row in new]), new)

    def _next_prompts(self, waiting: Sequence[DecodingRow]) -> dict[int, DecodingRow]:
        """The next `num_ahead` distinct waiting prompts: prompt key -> its first row."""
        rows: dict[int, DecodingRow] = {}
        for row in waiting:
            if len(rows) == self._num_ahead or not self._fits(row):
                break
            rows.setdefault(row.prompt_key, row)
        return rows

    def _compute(self, rows: Sequence[DecodingRow]) -> Iterator[Prefilled]:
        """Prefill the prompts of `rows`, all distinct, reusing cached prefixes of earlier turns."""
        known = {row: prefix for row in rows if (prefix := self._prefixes.longest(row.prompt_ids)) is not None}
        for row in rows:
            row.num_computed = len(row.prompt_ids) - (known[row].num_tokens if row in known else 0)
        plain = [row for row in rows if row not in known]
        for together in self._prefill_groups(plain):
            yield Prefilled(_keys(together), *self._model.prefill([row.prompt_ids for row in together]))
        for together in self._prefill_groups(list(known)):
            prefixes = [known[row] for row in together]
            suffixes = [row.prompt_ids[known[row].num_tokens :] for row in together]
            yield Prefilled(_keys(together), *self._model.extend(prefixes, suffixes))

    def _prefill_groups(self, rows: Sequence[DecodingRow]) -> Iterator[list[DecodingRow]]:
        for group in plan_prefill([row.num_computed for row in rows], self._prefill_batch_tokens):
            yield [rows[index] for index in group]

    def _fill(self, slots: Mapping[int, Sequence[int]], batch: Prefilled) -> None:
        copies = [(slot, index) for index, key in enumerate(batch.keys) for slot in slots.get(key, ())]
        if copies:
            self._model.cache.fill([slot for slot, _ in copies], batch.layers, [index for _, index in copies])

    def _decode(self) -> list[DecodingRow]:
        rows = self._active
        return sample(self._model.decode([row.token_ids[-1] for row in rows], [row.num_cached for row in rows]), rows)

    def _remove_finished(self) -> None:
        """Remove finished rows and fill the gaps with rows from the end. Keeps prefixes that next turns can reuse."""
        for slot, row in enumerate(self._active):
            prefix = None if row.finish_reason is None else row.prefix
            if prefix is not None and self._prefixes.lacks(prefix):
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


def _keys(rows: Sequence[DecodingRow]) -> list[int]:
    return [row.prompt_key for row in rows]


def plan_prefill(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Group prompts so that padding each group to its longest prompt wastes little. Returns indices into `lengths`.

    A group has at most `max_tokens` tokens, padding included, or a single prompt.

    Example:
        >>> plan_prefill([500, 4, 490, 5], max_tokens=1024)
        [[1, 3], [2, 0]]
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
