"""Attention of a `PrefixTree` on a CPU: each token attends to its segment up to itself and to the segments before it.

Attention over several sets of keys is a weighted mean of the attention over each, with the exponentials of their
logsumexps as weights. So no product is computed for a masked pair, and the keys and values of a shared beginning are
read in place, not once per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .prefix_tree import Segment

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Segments of similar lengths as N rows of L tokens, padded on the right."""

    index: Tensor
    """[N, L] int64: places of the tokens, 0 on padding."""
    is_token: Tensor | None
    """[N, L] bool, or None without padding."""
    tokens: Tensor
    """[number of tokens] int64: places of the tokens, without padding."""

    @classmethod
    def of(cls, segments: Sequence[Segment], device: torch.device) -> _Bucket:
        lengths = torch.tensor([each.stop - each.start for each in segments])
        columns = torch.arange(int(lengths.max()))
        is_token = columns < lengths[:, None]
        index = (torch.tensor([each.start for each in segments])[:, None] + columns) * is_token
        return cls(index.to(device), None if bool(is_token.all()) else is_token.to(device), index[is_token].to(device))

    def rows(self, values: Tensor) -> Tensor:
        """[T, H, ...] -> [N, H, L, ...]."""
        rows: Tensor = values.index_select(0, self.index.flatten()).unflatten(0, self.index.shape)
        return rows.transpose(1, 2)

    def flat(self, rows: Tensor) -> Tensor:
        """[N, H, L, ...] -> [number of tokens, H, ...]."""
        by_token = rows.transpose(1, 2)
        return by_token.flatten(0, 1) if self.is_token is None else by_token[self.is_token]

    def filled(self, rows: Tensor, value: float) -> Tensor:
        """[N, H, L, ...] with `value` on padding."""
        if self.is_token is None:
            return rows
        mask = ~self.is_token[:, None].unflatten(-1, (-1, *(1 for _ in rows.shape[3:])))
        return rows.masked_fill(mask, value)


class Blocks:
    """Pairs of queries and keys of a tree, without the masked ones, in few calls."""

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        by_length = sorted(segments, key=lambda each: each.start - each.stop)
        lengths = [each.stop - each.start for each in by_length]
        cuts = [0]
        for place, length in enumerate(lengths):
            if 2 * length <= lengths[cuts[-1]]:
                cuts.append(place)
        self.causal = [_Bucket.of(by_length[one:other], device) for one, other in pairwise([*cuts, len(by_length)])]
        self.full = [each for each in segments if each.end > each.stop]


def can_attend(query: Tensor, dropout: float) -> bool:
    """Whether `tree_attention` supports these tensors."""
    return query.device.type == "cpu" and dropout == 0.0 and query.dtype in (torch.float32, torch.bfloat16)


def tree_attention(query: Tensor, key: Tensor, value: Tensor, blocks: Blocks, scale: float | None) -> Tensor:
    """Attention over the tokens of a tree.

    Args:
        query: [1, H, T, D].
        key: [1, K, T, D], where H is a multiple of K.
        value: [1, K, T, D].
        blocks: Blocks of the tree.
        scale: Factor of the scores. None is 1 / sqrt(D).

    Returns:
        [1, T, H, D].
    """
    dtype = value.dtype  # under autocast, a norm may have returned query and key in float32
    output: Tensor = _TreeAttention.apply(query.to(dtype), key.to(dtype), value, blocks, scale)  # type: ignore[no-untyped-call]
    return output


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, blocks: Blocks, scale: float | None) -> Tensor:
        by_token = [each[0].transpose(0, 1) for each in (query, key, value)]
        output = query.new_empty(by_token[0].shape)
        sums = query.new_empty(output.shape[:2], dtype=torch.float32)
        for bucket in blocks.causal:
            found, logsumexp = _FORWARD(*(bucket.rows(each) for each in by_token), 0.0, True, scale=scale)
            output.index_copy_(0, bucket.tokens, bucket.flat(found))
            sums.index_copy_(0, bucket.tokens, bucket.flat(logsumexp))
        for each in blocks.full:
            own, after = slice(each.start, each.stop), slice(each.stop, each.end)
            found, logsumexp = _FORWARD(query[:, :, after], key[:, :, own], value[:, :, own], scale=scale)
            _merge(output[after], sums[after], found[0].transpose(0, 1), logsumexp[0].transpose(0, 1))
        ctx.save_for_backward(query, key, value, output, sums)
        ctx.blocks, ctx.scale = blocks, scale
        return output[None]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, sums = ctx.saved_tensors
        by_token = [each[0].transpose(0, 1) for each in (query, key, value)]
        results = [each.new_empty(each.shape) for each in by_token]
        for bucket in ctx.blocks.causal:
            found = _BACKWARD(
                bucket.filled(bucket.rows(grads[0]), 0.0),
                *(bucket.rows(each) for each in (*by_token, output)),
                bucket.filled(bucket.rows(sums), torch.inf),
                0.0,
                True,
                scale=ctx.scale,
            )
            for result, part in zip(results, found, strict=True):
                result.index_copy_(0, bucket.tokens, bucket.flat(part))
        as_rows = [each.transpose(0, 1)[None] for each in (grads[0], output)]
        for each in ctx.blocks.full:
            own, after = slice(each.start, each.stop), slice(each.stop, each.end)
            found = _BACKWARD(
                as_rows[0][:, :, after],
                query[:, :, after],
                key[:, :, own],
                value[:, :, own],
                as_rows[1][:, :, after],
                sums[after].transpose(0, 1)[None],
                0.0,
                False,
                scale=ctx.scale,
            )
            for result, part, where in zip(results, found, (after, own, own), strict=True):
                result[where] += part[0].transpose(0, 1)
        return *(each.transpose(0, 1)[None] for each in results), None, None


def _merge(output: Tensor, sums: Tensor, other: Tensor, logsumexp: Tensor) -> None:
    """Add the attention `other` over further keys to `output` [N, H, D], in place. `sums`: logsumexp [N, H]."""
    total = torch.logaddexp(sums, logsumexp)
    output.mul_((sums - total).exp().unsqueeze(-1)).add_(other * (logsumexp - total).exp().unsqueeze(-1))
    sums.copy_(total)
