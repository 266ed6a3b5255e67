"""A bounded key-value cache of slots: every row has its own length.

Rows occupy slots 0..n-1 without gaps, each starting at position 0 of its slot, so that a decoding step works on one
plain view `[:n, :, :longest]`. Values past a row's length are stale but finite; the step's mask hides them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

GROWTH = 64
"""Tokens for which the cache makes room beyond those there are, at least, up to what its rows may have.

What it grows out of leaves holes in a CPU's heap that the larger tensors do not fit into.
"""
Layers = Sequence[tuple[Tensor, Tensor]]
"""Keys and values of each layer: [rows, heads, tokens, dim] each."""
BLOCK = 16
"""Its room for a row is a multiple of this: with rows of 80 tokens, one of 64 would cost 60% more."""


def round_up(num_tokens: int) -> int:
    """Round up to whole blocks."""
    return -(-num_tokens // BLOCK) * BLOCK


def round_down(num_tokens: int) -> int:
    """Round down to whole blocks."""
    return num_tokens // BLOCK * BLOCK


def layers_of(cache: Cache) -> Layers:
    """What a plain cache holds. Raises `AssertionError` for one with layers of another kind."""
    found = []
    for layer in cache.layers:
        assert isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None
        found.append((layer.keys, layer.values))
    return found


@dataclass(slots=True)
class Step:
    """Where the current decoding step writes to, for every layer."""

    lengths: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """[n] tokens in each row before this step."""
    longest: int = 0
    """Tokens in the longest row, this step's included."""


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer: [slots, heads, capacity, dim] each."""

    is_sliding = False

    def __init__(self, step: Step, num_slots: int, capacity: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._step = step
        self._num_slots = num_slots
        self._capacity = capacity

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = (self._room(key_states), self._room(value_states))
        self.is_initialized = True

    def _room(self, states: Tensor) -> Tensor:
        # Zeros, not empty: a masked NaN would still poison the weighted sum of values.
        return states.new_zeros(self._num_slots, states.shape[1], self._capacity, states.shape[3])

    def _rooms(self) -> tuple[Tensor, Tensor]:
        assert self.keys is not None and self.values is not None
        return self.keys, self.values

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write one token per row ([n, heads, 1, dim]); return views [n, heads, longest, dim]."""
        keys, values = self._rooms()
        return self._write(keys, key_states), self._write(values, value_states)

    def _write(self, room: Tensor, states: Tensor) -> Tensor:
        count = len(states)
        room[torch.arange(count, device=room.device), :, self._step.lengths] = states[:, :, 0].to(room.dtype)
        return room[:count, :, : self._step.longest]

    def fill(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put whole rows [k, heads, length, dim] into `slots` [k]."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        for room, states in zip(self._rooms(), (keys, values), strict=True):
            room[:, :, : states.shape[2]].index_copy_(0, slots, states.to(room.dtype))

    def copy_rows(self, sources: Tensor, targets: Tensor, length: int) -> None:
        for room in self._rooms():
            room[:, :, :length].index_copy_(0, targets, room[:, :, :length].index_select(0, sources))

    def read(self, slot: int, length: int) -> tuple[Tensor, Tensor]:
        """A copy of the first tokens of a slot, [heads, length, dim] each."""
        keys, values = self._rooms()
        return keys[slot, :, :length].clone(), values[slot, :, :length].clone()

    def grow(self, capacity: int) -> None:
        more, self._capacity = capacity - self._capacity, capacity
        if self.is_initialized:
            # One after the other, so that only one tensor is held twice at a time.
            self.keys = functional.pad(self._rooms()[0], (0, 0, 0, more))
            self.values = functional.pad(self._rooms()[1], (0, 0, 0, more))

    def get_seq_length(self) -> int:
        return max(self._step.longest - 1, 0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._step.longest, 0

    def get_max_length(self) -> int:
        return self._capacity


class SlotCache(Cache):
    """All layers, for at most `num_slots` rows of at most `max_tokens` tokens (grown towards it in blocks)."""

    def __init__(self, num_slots: int, max_tokens: int, most_tokens: int | None = None) -> None:
        """most_tokens: bound on what `admit` may make of `max_tokens`; None is no more than that."""
        self._step = Step()
        self._most_tokens = most_tokens or round_up(max_tokens)
        self._num_slots = num_slots
        self._max_tokens = round_up(max_tokens)
        self.capacity = 0
        """Tokens a slot has room for now."""
        self._slot_layers: list[SlotLayer] = []
        super().__init__(layers=self._slot_layers)  # type: ignore[arg-type]

    def fill(self, slots: Sequence[int], source: Layers, rows: Sequence[int]) -> None:
        """Copy `rows` of the source into `slots`."""
        self.reserve(source[0][0].shape[2])
        while len(self._slot_layers) < len(source):
            self._slot_layers.append(SlotLayer(self._step, self._num_slots, self.capacity))
        for layer, (keys, values) in zip(self._slot_layers, source, strict=True):
            index = torch.tensor(rows, device=keys.device)
            taken = keys.index_select(0, index), values.index_select(0, index)
            layer.fill(torch.tensor(slots, device=keys.device), *taken)

    def read(self, slot: int, length: int) -> list[tuple[Tensor, Tensor]]:
        """Copies of the keys and values of the first `length` tokens of a slot, by layer."""
        return [layer.read(slot, length) for layer in self._slot_layers]

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` tokens of slots to other slots."""
        for layer in self._slot_layers:
            device = layer.device
            layer.copy_rows(torch.tensor(sources, device=device), torch.tensor(targets, device=device), length)

    def may_hold(self, num_tokens: int) -> bool:
        """Whether a row so long may be admitted."""
        return round_up(num_tokens) <= self._most_tokens

    def admit(self, num_tokens: int) -> None:
        """Expect rows of so many tokens."""
        assert self.may_hold(num_tokens), (num_tokens, self._most_tokens)
        self._max_tokens = max(self._max_tokens, round_up(num_tokens))

    def begin_step(self, lengths: Tensor, longest: int) -> None:
        """Tell every layer where this step's tokens go: behind `lengths` [n]; `longest` is max(lengths) + 1."""
        self.reserve(longest)
        self._step.lengths, self._step.longest = lengths, longest

    def reserve(self, num_tokens: int) -> None:
        """Make room for `num_tokens` per slot."""
        if num_tokens <= self.capacity:
            return
        assert num_tokens <= self._max_tokens, (num_tokens, self._max_tokens)
        self.capacity = min(self._max_tokens, round_up(num_tokens + max(GROWTH, self.capacity // 2)))
        for layer in self._slot_layers:
            layer.grow(self.capacity)
