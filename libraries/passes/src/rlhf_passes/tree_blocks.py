"""Blocks of `tree_attention` on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from .prefix_tree import Segment

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def causal_buckets(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Group segments by length, such that each is longer than half of the longest of its group."""
    by_length = sorted(segments, key=lambda each: each.start - each.stop)
    lengths = [each.stop - each.start for each in by_length]
    cuts = [0]
    for place, length in enumerate(lengths):
        if 2 * length <= lengths[cuts[-1]]:
            cuts.append(place)
    return [by_length[one:other] for one, other in pairwise([*cuts, len(by_length)])]


class CpuCausal:
    """Segments whose tokens attend to the earlier ones of the same segment, as N rows of L tokens, padded right."""

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        lengths = torch.tensor([each.stop - each.start for each in segments])
        columns = torch.arange(int(lengths.max()))
        is_token = columns < lengths[:, None]
        index = (torch.tensor([each.start for each in segments])[:, None] + columns) * is_token
        self._index = index.to(device)
        self._is_token = None if bool(is_token.all()) else is_token.to(device)
        self.queries = self.keys = index[is_token].to(device)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
        found, sums = _FORWARD(*(self._rows(each) for each in (query, key, value)), 0.0, True, scale=scale)
        return self._flat(found), self._flat(sums)

    def backward(
        self, tensors: tuple[Tensor, Tensor, Tensor], output: Tensor, sums: Tensor, grads: Tensor, scale: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Infinite sums and zero gradients on padding make all products with it zero.
        filled = self._filled(self._rows(grads), 0.0)
        rows = [self._rows(each) for each in (*tensors, output)]
        infinite = self._filled(self._rows(sums), torch.inf)
        found = _BACKWARD(filled, *rows, infinite, 0.0, True, scale=scale)
        query, key, value = (self._flat(each) for each in found)
        return query, key, value

    def _rows(self, values: Tensor) -> Tensor:
        """[T, H, ...] -> [N, H, L, ...]."""
        rows: Tensor = values.index_select(0, self._index.flatten()).unflatten(0, self._index.shape)
        return rows.transpose(1, 2)

    def _flat(self, rows: Tensor) -> Tensor:
        """[N, H, L, ...] -> [number of tokens, H, ...]."""
        by_token = rows.transpose(1, 2)
        return by_token.flatten(0, 1) if self._is_token is None else by_token[self._is_token]

    def _filled(self, rows: Tensor, value: float) -> Tensor:
        """[N, H, L, ...] with `value` on padding."""
        if self._is_token is None:
            return rows
        return rows.masked_fill(~self._is_token.view(len(rows), 1, -1, *(1 for _ in rows.shape[3:])), value)


class CpuFull:
    """The continuations of a segment, whose tokens attend to all of its tokens."""

    def __init__(self, segment: Segment) -> None:
        self.queries, self.keys = slice(segment.stop, segment.end), slice(segment.start, segment.stop)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
        tensors = _as_rows(query[self.queries], key[self.keys], value[self.keys])
        found, sums = _FORWARD(*tensors, scale=scale)
        return found[0].transpose(0, 1), sums[0].transpose(0, 1)

    def backward(
        self, tensors: tuple[Tensor, Tensor, Tensor], output: Tensor, sums: Tensor, grads: Tensor, scale: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = tensors
        given = grads[self.queries], query[self.queries], key[self.keys], value[self.keys]
        own = output[self.queries], sums[self.queries]
        found = _BACKWARD(*_as_rows(*given), *_as_rows(*own), 0.0, False, scale=scale)
        return found[0][0].transpose(0, 1), found[1][0].transpose(0, 1), found[2][0].transpose(0, 1)


def _as_rows(*tensors: Tensor) -> list[Tensor]:
    """[N, H, ...] -> [1, H, N, ...] each."""
    return [each.transpose(0, 1)[None] for each in tensors]
