"""Continuous batching: a finished row leaves at once, and a waiting prompt takes its slot."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Container, Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from .prefixes import Prefix, PrefixStore
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

OUTDATED = -1
"""Prompt key of a row whose prompt was filled in with older weights: no other row shares it."""


class SlotBatch:
    """Decodes all `rows`, as many at once as there are slots."""

    def __init__(self, model: SlotModel, rows: Sequence[Row], prefill_batch_tokens: int, prefixes: PrefixStore) -> None:
        self._model = model
        self._prefixes = prefixes
        self._waiting: deque[Row] = deque()
        self._num_waiting: Counter[int] = Counter()
        self.join(rows)
        self._prefill_batch_tokens = prefill_batch_tokens
        self._active: list[Row] = []
        """The row in each used slot."""
        self._first_logits: dict[int, Tensor] = {}
        """By prompt key, [V] behind each prompt that lies in a slot and that a waiting row needs."""
        self._computed: dict[int, int] = {}
        """Prompt key -> tokens that were computed for it, until its first row enters."""
        self._ahead: dict[int, int] = {}
        """Prompt key -> the spare slot where it lies for waiting rows."""
        self.num_steps = 0
        """Decoding passes so far."""
        self.num_prefilled_tokens = 0
        """Prompt tokens that went through the model so far, padding not counted."""

    @property
    def busy(self) -> bool:
        return bool(self._active or self._waiting)

    def has_room_for(self, row: Row) -> bool:
        """Whether it may `join`: the slots cannot grow beyond the bound on the cache, nor take a model's inputs."""
        return not row.request.inputs and self._model.cache.may_hold(len(row.prompt_ids) + row.limit)

    def join(self, rows: Sequence[Row]) -> None:
        """Decode these too, after those that wait already. Their prompt keys are new."""
        for row in rows:
            self._model.cache.admit(len(row.prompt_ids) + row.limit)
        self._waiting.extend(rows)
        self._num_waiting.update(row.prompt_key for row in rows)

    def drop(self, row: Row) -> None:
        """Decode it no further."""
        if row in self._active:
            row.finish_reason = "length"
        else:
            self._waiting.remove(row)
            self._num_waiting[row.prompt_key] -= 1
            if not self._num_waiting[row.prompt_key]:
                self._computed.pop(row.prompt_key, None)
        self._leave([row])

    def weights_changed(self) -> None:
        """Forget what was computed for rows to come. Those in slots go on from their own keys and values."""
        for row in self._active:
            row.prompt_key = OUTDATED
        self._first_logits.clear()
        self._ahead.clear()
        self._computed.clear()

    def step(self) -> list[Row]:
        """Run one pass; return the rows that it finished."""
        return self._admit() if self._should_admit() else self._decode()

    def _should_admit(self) -> bool:
        free = self._model.num_slots - len(self._active)
        enough = min(len(self._waiting), max(1, self._model.num_slots // REFILL_SHARE))
        return bool(self._waiting) and (not self._active or free >= enough)

    def _admit(self) -> list[Row]:
        """Fill the free slots and sample the first token of each new row."""
        count = min(self._model.num_slots - len(self._active), len(self._waiting))
        new = [self._waiting.popleft() for _ in range(count)]
        self._num_waiting -= Counter(row.prompt_key for row in new)
        first = len(self._active)
        self._active.extend(new)
        slots: dict[int, list[int]] = {}
        for slot, row in enumerate(new, start=first):
            slots.setdefault(row.prompt_key, []).append(slot)
        self._share({key: slots[key] for key in slots if key in self._first_logits}, first)
        fresh = [self._active[where[0]] for key, where in slots.items() if key not in self._first_logits]
        if fresh:
            spare = self._free_spare()
            for row, slot in zip(self._next_prompts(slots, len(spare)), spare, strict=False):
                self._ahead[row.prompt_key] = slot
                slots[row.prompt_key] = [slot]
                fresh.append(row)
        self._fill(fresh, slots)
        for row in new:
            row.num_reused = len(row.prompt_ids) - self._computed.pop(row.prompt_key, 0)
        finished = sample(torch.stack([self._first_logits[row.prompt_key] for row in new]), new)
        self._leave(finished)
        # Cloned, so that keeping one prompt's logits does not keep those of its whole prefill batch.
        self._first_logits = {key: logits.clone() for key, logits in self._first_logits.items()}
        return finished

    def _share(self, slots: dict[int, list[int]], num_old: int) -> None:
        """Fill slots whose prompt is already cached in an older or a spare slot, by copying it."""
        if not slots:
            return
        holders = {row.prompt_key: slot for slot, row in enumerate(self._active[:num_old])} | self._ahead
        copies = [(holders[key], target) for key, targets in slots.items() for target in targets]
        longest = max(len(self._active[target].prompt_ids) for _, target in copies)
        self._model.cache.copy_rows([source for source, _ in copies], [target for _, target in copies], longest)

    def _next_prompts(self, taken: Container[int], most: int) -> list[Row]:
        """One waiting row for each of the next `most` prompts that are in no slot."""
        found: dict[int, Row] = {}
        for row in self._waiting:
            if len(found) == most:
                break
            if row.prompt_key not in taken and row.prompt_key not in self._first_logits:
                found.setdefault(row.prompt_key, row)
        return list(found.values())

    def _free_spare(self) -> list[int]:
        """Empty spare slots; spare slots follow those that decode."""
        first, used = self._model.num_slots, set(self._ahead.values())
        return [slot for slot in range(first, first + self._model.num_spare) if slot not in used]

    def _fill(self, rows: Sequence[Row], slots: dict[int, list[int]]) -> None:
        """Compute the prompts of `rows`, all different, but for what earlier turns left; copy each to all its slots."""
        known = {row: prefix for row in rows if (prefix := self._prefixes.longest(row.prompt_ids)) is not None}
        for row in rows:
            begins = known[row].num_tokens if row in known else 0
            self._computed[row.prompt_key] = len(row.prompt_ids) - begins
            self.num_prefilled_tokens += len(row.prompt_ids) - begins
        plain = [row for row in rows if row not in known]
        for group in plan_prefill([len(row.prompt_ids) for row in plain], self._prefill_batch_tokens):
            self._prefill([plain[index] for index in group], slots)
        longer = list(known.items())
        rest = [len(row.prompt_ids) - prefix.num_tokens for row, prefix in longer]
        for group in plan_prefill(rest, self._prefill_batch_tokens):
            self._extend([longer[index] for index in group], slots)

    def _prefill(self, rows: list[Row], slots: dict[int, list[int]]) -> None:
        self._enter(rows, slots, *self._model.prefill([row.prompt_ids for row in rows]))

    def _extend(self, rows: list[tuple[Row, Prefix]], slots: dict[int, list[int]]) -> None:
        suffixes = [row.prompt_ids[prefix.num_tokens :] for row, prefix in rows]
        self._enter([row for row, _ in rows], slots, *self._model.extend([prefix for _, prefix in rows], suffixes))

    def _enter(
        self, rows: list[Row], slots: dict[int, list[int]], logits: Tensor, cache: Cache, places: Tensor | None = None
    ) -> None:
        """Copy what was computed for `rows` to their slots; see `SlotCache.fill`."""
        copies = [(slot, index) for index, row in enumerate(rows) for slot in slots[row.prompt_key]]
        self._model.cache.fill([slot for slot, _ in copies], cache, [index for _, index in copies], places)
        self._first_logits.update(zip((row.prompt_key for row in rows), logits, strict=True))

    def _keep_prefixes(self) -> None:
        """Store the prefixes of finished rows whose episode may go on."""
        for slot, row in enumerate(self._active):
            if row.finish_reason is None or (prefix := row.prefix) is None or not self._prefixes.may_hold(len(prefix)):
                continue
            self._prefixes.put(prefix, self._model.cache.read(slot, len(prefix)))

    def _decode(self) -> list[Row]:
        rows = self._active
        logits = self._model.decode([row.token_ids[-1] for row in rows], [row.num_cached for row in rows])
        self.num_steps += 1
        finished = sample(logits, rows)
        self._leave(finished)
        return finished

    def _leave(self, finished: Sequence[Row]) -> None:
        """Remove finished rows, filling the gaps with rows from the end."""
        if finished:
            self._keep_prefixes()
            self._compact()
        if self._first_logits:
            self._ahead = {key: slot for key, slot in self._ahead.items() if self._num_waiting[key]}
            held = {row.prompt_key for row in self._active if self._num_waiting[row.prompt_key]} | self._ahead.keys()
            self._first_logits = {key: logits for key, logits in self._first_logits.items() if key in held}

    def _compact(self) -> None:
        count = sum(row.finish_reason is None for row in self._active)
        holes = [slot for slot, row in enumerate(self._active[:count]) if row.finish_reason is not None]
        movers = [slot for slot, row in enumerate(self._active) if slot >= count and row.finish_reason is None]
        if movers:
            longest = max(self._active[slot].num_cached for slot in movers)
            self._model.cache.copy_rows(movers, holes, longest)
            for mover, hole in zip(movers, holes, strict=True):
                self._active[hole] = self._active[mover]
        del self._active[count:]


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
