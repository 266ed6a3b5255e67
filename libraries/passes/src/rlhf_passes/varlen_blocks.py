"""Blocks of `tree_attention` on a CUDA GPU: segments of any lengths in one call of torch's flash kernel per depth."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .prefix_tree import Segment


class VarlenBlock:
    """Ranges of queries, each of which attends to a range of keys."""

    def __init__(
        self, queries: Sequence[range], keys: Sequence[range], device: torch.device, *, is_causal: bool
    ) -> None:
        """Create a block. With `is_causal`, queries and keys are the same."""
        self.queries = _indices(queries).to(device)
        self.keys = _indices(keys).to(device)
        self._layout = _ends(queries).to(device), _ends(keys).to(device), max(map(len, queries)), max(map(len, keys))
        self._is_causal = is_causal

    @staticmethod
    def supports(value: Tensor) -> bool:
        """Whether torch's flash kernel supports these values, [1, K, T, D], on their GPU: Nvidia's from Ampere on."""
        head_size = value.shape[-1]
        return (
            value.dtype in (torch.bfloat16, torch.float16)
            and head_size <= 256
            and head_size % 8 == 0
            and torch.version.hip is None
            and torch.backends.cuda.is_flash_attention_available()
            and torch.cuda.get_device_capability(value.device) >= (8, 0)
        )

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
        tensors = query[self.queries], key[self.keys], value[self.keys]
        found, sums, *_ = torch.ops.aten._flash_attention_forward(
            *tensors, *self._layout, 0.0, self._is_causal, False, scale=scale
        )
        return found, sums.transpose(0, 1)

    def backward(
        self, tensors: tuple[Tensor, Tensor, Tensor], output: Tensor, sums: Tensor, grads: Tensor, scale: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = tensors[0][self.queries], tensors[1][self.keys], tensors[2][self.keys]
        unused = torch.empty(2, dtype=torch.uint64, device=query.device)  # the state of dropout's generator
        found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
            grads[self.queries].contiguous(),
            query,
            key,
            value,
            output[self.queries],
            sums[self.queries].transpose(0, 1).contiguous(),
            *self._layout,
            0.0,
            self._is_causal,
            unused,
            torch.empty((), dtype=torch.uint64, device=query.device),
            scale=scale,
        )
        return found


def varlen_blocks(
    segments: Sequence[Segment], device: torch.device
) -> tuple[Sequence[VarlenBlock], Sequence[VarlenBlock]]:
    """Return the block of tokens and their own segments, and one block per depth of tokens and segments before."""
    own = [range(each.start, each.stop) for each in segments]
    levels: list[list[Segment]] = []
    open_ends: list[int] = []
    for segment in segments:
        while open_ends and segment.start >= open_ends[-1]:
            open_ends.pop()
        if segment.end > segment.stop:
            if len(levels) == len(open_ends):
                levels.append([])
            levels[len(open_ends)].append(segment)
            open_ends.append(segment.end)
    before = [
        VarlenBlock(
            [range(each.stop, each.end) for each in level],
            [range(each.start, each.stop) for each in level],
            device,
            is_causal=False,
        )
        for level in levels
    ]
    return [VarlenBlock(own, own, device, is_causal=True)], before


def _indices(ranges: Sequence[range]) -> Tensor:
    return torch.cat([torch.arange(each.start, each.stop) for each in ranges])


def _ends(ranges: Sequence[range]) -> Tensor:
    """[len(ranges) + 1] int32: cumulative lengths, from 0."""
    return torch.tensor([0, *map(len, ranges)]).cumsum(0).int()
