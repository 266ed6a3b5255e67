"""Attention of a `PrefixTree`: each token attends to its segment up to itself and to the segments before it.

Attention over several sets of keys is a weighted mean of the attention over each, with the exponentials of their
logsumexps as weights. So no product is computed for a masked pair, and the keys and values of a shared beginning are
read in place, not once per row. torch's flash kernels compute each set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .prefix_tree import Segment
from .tree_blocks import CpuCausal, CpuFull, causal_buckets
from .varlen_blocks import VarlenBlock, varlen_blocks

_IS_RECENT = torch.__version__ >= "2.9"
"""Whether torch's flash kernel for a CPU accepts fewer heads of keys than of queries. On a GPU, older versions are not
used, since the shape of their logsumexps differed."""
Place = slice | Tensor
"""Tokens, as a slice or as int64 indices."""


class Block(Protocol):
    """Queries that attend to keys, in flash kernels. All tensors are [T, heads, D]."""

    @property
    def queries(self) -> Place: ...

    @property
    def keys(self) -> Place: ...

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
        """Return the attention of the block's queries over its keys, [N, H, D], and logsumexps [N, H] float32."""

    def backward(
        self, tensors: tuple[Tensor, Tensor, Tensor], output: Tensor, sums: Tensor, grads: Tensor, scale: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of queries and of keys and values, given output and logsumexp over all keys."""


class Blocks:
    """Pairs of queries and keys of a tree, without the masked ones, in few blocks."""

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        self.own: Sequence[Block]
        """Blocks that together contain each token once, as a query that attends to its own segment."""
        self.before: Sequence[Block]
        """Blocks of tokens that attend to earlier segments."""
        if device.type == "cuda":
            self.own, self.before = varlen_blocks(segments, device)
        else:
            self.own = [CpuCausal(each, device) for each in causal_buckets(segments)]
            self.before = [CpuFull(each) for each in segments if each.end > each.stop]


def can_attend(query: Tensor, value: Tensor, dropout: float) -> bool:
    """Whether `tree_attention` supports these tensors."""
    if dropout or query.shape[-1] != value.shape[-1]:
        return False
    if query.is_cuda:
        return _IS_RECENT and VarlenBlock.supports(value)
    if query.shape[1] != value.shape[1] and not _IS_RECENT:
        return False
    return query.device.type == "cpu" and value.dtype in (torch.float32, torch.bfloat16)


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
    # The kernels read the elements of a head as adjacent, without a check on a CPU.
    dense = (each if each.stride(-1) == 1 else each.contiguous() for each in (query, key, value))
    by_token = (each[0].transpose(0, 1).to(dtype) for each in dense)
    output: Tensor = _TreeAttention.apply(*by_token, blocks, scale)  # type: ignore[no-untyped-call]
    return output[None]


class _TreeAttention(torch.autograd.Function):
    """query [T, H, D], key and value [T, K, D] -> [T, H, D]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, blocks: Blocks, scale: float | None) -> Tensor:
        output = query.new_empty(query.shape)
        sums = query.new_empty(output.shape[:2], dtype=torch.float32)
        for block in blocks.own:
            output[block.queries], sums[block.queries] = block.forward(query, key, value, scale)
        for block in blocks.before:
            found, logsumexp = block.forward(query, key, value, scale)
            before = sums[block.queries]
            total = torch.logaddexp(before, logsumexp)
            weight, other = (before - total).exp().unsqueeze(-1), (logsumexp - total).exp().unsqueeze(-1)
            output[block.queries] = (output[block.queries] * weight + found * other).to(output.dtype)
            sums[block.queries] = total
        ctx.save_for_backward(query, key, value, output, sums)
        ctx.blocks, ctx.scale = blocks, scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, sums = ctx.saved_tensors
        dtype = query.dtype
        if query.device.type == "cpu":  # in bfloat16 the kernel for a CPU is several times slower
            query, key, value, output, grads = (each.float() for each in (query, key, value, output, grads))
        results = [torch.empty_like(each, memory_format=torch.contiguous_format) for each in (query, key, value)]
        for block in (*ctx.blocks.own, *ctx.blocks.before):
            found = block.backward((query, key, value), output, sums, grads, ctx.scale)
            for result, part, place in zip(results, found, (block.queries, block.keys, block.keys), strict=True):
                if block in ctx.blocks.own:
                    result[place] = part
                else:
                    result[place] += part
        return *(each.to(dtype) for each in results), None, None
