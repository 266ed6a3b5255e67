"""A bounded key-value cache with one slot per row. Each row has its own length.

Rows occupy slots 0..n-1 without gaps, each starting at position 0 of its slot, so a decoding step works on one plain
view `[:n, :, :longest]`. Values past a row's length are stale but finite, and the step's mask hides them.
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
"""Minimum number of extra tokens per slot when the cache grows, up to the maximum length of its rows.

Growing rarely avoids fragmentation: the freed smaller tensors leave holes in a CPU's heap.
"""
Layers = Sequence[tuple[Tensor, Tensor]]
"""Keys and values of each layer: [rows, heads, tokens, dim] each."""
BLOCK = 16
"""Slot sizes are multiples of this many tokens. For rows of 80 tokens, multiples of 64 would cost 60% more memory."""


def round_up(num_tokens: int) -> int:
    """Round up to whole blocks."""
    return -(-num_tokens // BLOCK) * BLOCK


def round_down(num_tokens: int) -> int:
    """Round down to whole blocks."""
    return num_tokens // BLOCK * BLOCK


def layers_of(cache: Cache) -> Layers:
    """Keys and values of a plain cache. Raises `AssertionError` if it has other kinds of layers."""
    layers = []
    for layer in cache.layers:
        assert isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None
        layers.append((layer.keys, layer.values))
    return layers


@dataclass(slots=True)
class Step:
    """Write positions of the current decoding step, shared by all layers."""

    lengths: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """[n] tokens in each row before this step."""
    longest: int = 0
    """Tokens in the longest row, including this step's."""


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
        self.keys, self.values = (self._allocate(key_states), self._allocate(value_states))
        self.is_initialized = True

    def _allocate(self, states: Tensor) -> Tensor:
        # Zeros, not uninitialized: a masked NaN would still poison the weighted sum of values.
        return states.new_zeros(self._num_slots, states.shape[1], self._capacity, states.shape[3])

    def _buffers(self) -> tuple[Tensor, Tensor]:
        assert self.keys is not None and self.values is not None
        return self.keys, self.values

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write one token per row, [n, heads, 1, dim], and return views [n, heads, longest, dim]."""
        keys, values = self._buffers()
        return self._write(keys, key_states), self._write(values, value_states)

    def _write(self, buffer: Tensor, states: Tensor) -> Tensor:
        count = len(states)
        buffer[torch.arange(count, device=buffer.device), :, self._step.lengths] = states[:, :, 0].to(buffer.dtype)
        return buffer[:count, :, : self._step.longest]

    def fill(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write k rows, [k, heads, length, dim], into `slots`, [k]."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        for buffer, states in zip(self._buffers(), (keys, values), strict=True):
            buffer[:, :, : states.shape[2]].index_copy_(0, slots, states.to(buffer.dtype))

    def copy_rows(self, sources: Tensor, targets: Tensor, length: int) -> None:
        for buffer in self._buffers():
            buffer[:, :, :length].index_copy_(0, targets, buffer[:, :, :length].index_select(0, sources))

    def read(self, slot: int, length: int) -> tuple[Tensor, Tensor]:
        """Copies of the keys and values of a slot's first `length` tokens, [heads, length, dim] each."""
        keys, values = self._buffers()
        return keys[slot, :, :length].clone(), values[slot, :, :length].clone()

    def grow(self, capacity: int) -> None:
        more, self._capacity = capacity - self._capacity, capacity
        if self.is_initialized:
            # One after the other, so only one tensor is held twice at a time.
            self.keys = functional.pad(self._buffers()[0], (0, 0, 0, more))
            self.values = functional.pad(self._buffers()[1], (0, 0, 0, more))

    def get_seq_length(self) -> int:
        return max(self._step.longest - 1, 0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._step.longest, 0

    def get_max_length(self) -> int:
        return self._capacity


class SlotCache(Cache):
    """Cache of all layers for at most `num_slots` rows. It grows in blocks up to `max_tokens` tokens per row."""

    def __init__(self, num_slots: int, max_tokens: int, token_limit: int | None = None) -> None:
        """`token_limit`: upper bound to which `admit` may raise `max_tokens`, by default `max_tokens`."""
        self._step = Step()
        self._token_limit = token_limit or round_up(max_tokens)
        self._num_slots = num_slots
        self._max_tokens = round_up(max_tokens)
        self.capacity = 0
        """Current number of tokens per slot."""
        self._slot_layers: list[SlotLayer] = []
        super().__init__(layers=self._slot_layers)  # type: ignore[arg-type]

    def fill(self, slots: Sequence[int], source: Layers, rows: Sequence[int]) -> None:
        """Copy `rows` of `source` into `slots`."""
        self.reserve(source[0][0].shape[2])
        while len(self._slot_layers) < len(source):
            self._slot_layers.append(SlotLayer(self._step, self._num_slots, self.capacity))
        for layer, (keys, values) in zip(self._slot_layers, source, strict=True):
            index = torch.tensor(rows, device=keys.device)
            states = keys.index_select(0, index), values.index_select(0, index)
            layer.fill(torch.tensor(slots, device=keys.device), *states)

    def read(self, slot: int, length: int) -> list[tuple[Tensor, Tensor]]:
        """Copies of the keys and values of the first `length` tokens of a slot, by layer."""
        return [layer.read(slot, length) for layer in self._slot_layers]

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` tokens of slots to other slots."""
        for layer in self._slot_layers:
            device = layer.device
            layer.copy_rows(torch.tensor(sources, device=device), torch.tensor(targets, device=device), length)

    def can_hold(self, num_tokens: int) -> bool:
        """Whether a row of `num_tokens` may be admitted."""
        return round_up(num_tokens) <= self._token_limit

    def admit(self, num_tokens: int) -> None:
        """Raise the maximum row length to at least `num_tokens`."""
        assert self.can_hold(num_tokens), (num_tokens, self._token_limit)
        self._max_tokens = max(self._max_tokens, round_up(num_tokens))

    def begin_step(self, lengths: Tensor, longest: int) -> None:
        """Set this step's write positions for all layers: `lengths`, [n]. `longest` is max(lengths) + 1."""
        self.reserve(longest)
        self._step.lengths, self._step.longest = lengths, longest

    def reserve(self, num_tokens: int) -> None:
        """Grow all layers to at least `num_tokens` per slot."""
        if num_tokens <= self.capacity:
            return
        assert num_tokens <= self._max_tokens, (num_tokens, self._max_tokens)
        self.capacity = min(self._max_tokens, round_up(num_tokens + max(GROWTH, self.capacity // 2)))
        for layer in self._slot_layers:
            layer.grow(self.capacity)
