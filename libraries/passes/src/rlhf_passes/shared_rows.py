"""Packed rows that contain beginnings shared by several samples only once, such as the prompt of a group of answers.

A token of a causal model depends only on the tokens before it, so samples with the same beginning have the same values
there, and their gradients add up. The same holds for episodes of several rows and for pairs of answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .packing import PackedRows, Packing
from .prefix_tree import PrefixTree
from .tree_attention import Blocks, can_attend, tree_attention

if TYPE_CHECKING:
    from rlhf_forward.rows import PaddedRows

MIN_SAVED_SHARE = 0.05
"""Minimum share of the tokens that shared beginnings must save."""


@dataclass(frozen=True, slots=True)
class SharedPacking(Packing):
    """Mapping between T packed tokens and B rows of width W, several of which may contain the same packed token."""

    tokens: Tensor
    """[B * W] int64: packed token of each place in the rows, any token on padding."""
    blocks: Blocks

    def as_rows(self, packed: Tensor) -> Tensor:
        """Unpack [1, H, T, D] to [B, H, W, D], with any values on padding."""
        rows: Tensor = packed[0].transpose(0, 1).index_select(0, self.tokens)
        return rows.view(self.num_rows, self.width, *rows.shape[1:]).transpose(1, 2)

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, sliding_window: int | None, options: Mapping[str, Any]
    ) -> Tensor | None:
        is_windowed = sliding_window is not None and sliding_window < self.width
        if is_windowed or not can_attend(query, value, options.get("dropout", 0.0)):
            return None
        return tree_attention(query, key, value, self.blocks, options.get("scaling"))


class SharedRows(PackedRows):
    """All samples in one row, without padding and with shared beginnings only once, inside `packed_attention`."""

    def __init__(self, rows: PaddedRows, tree: PrefixTree) -> None:
        device = rows.sequences.device
        is_token = rows.attention_mask
        num_rows, width = is_token.shape
        sources = torch.from_numpy(tree.sources).to(device)
        places = torch.from_numpy(tree.places).to(device)
        self.inputs: dict[str, Any] = {
            "input_ids": rows.sequences.flatten()[sources][None],
            "attention_mask": is_token.new_ones(1, 1, 0, 0),  # as in `PackedRows`
            "position_ids": (sources % width)[None],
            "packing": SharedPacking(
                places=sources,  # one of the places in the rows that contain the token
                num_rows=num_rows,
                width=width,
                tokens=places.flatten(),
                blocks=Blocks(tree.segments, device),
            ),
        }
        self.lengths: Tensor = rows.lengths[sources // width, 0][None]
        self.logits_to_keep: Tensor = places[rows.is_read]

    @classmethod
    def of(cls, rows: PaddedRows, *, min_saved_share: float = MIN_SAVED_SHARE) -> SharedRows | None:
        """Lay out rows of a batch. None if sharing does not save enough tokens."""
        lengths = rows.lengths[:, 0].tolist()
        tree = PrefixTree.of(rows.sequences.cpu().numpy(), lengths)
        num_tokens = len(tree.sources)
        # With as many tokens as actions, `of_actions` could not distinguish them.
        if num_tokens > (1 - min_saved_share) * sum(lengths) or num_tokens == int(rows.is_read.sum()):
            return None
        return cls(rows, tree)
