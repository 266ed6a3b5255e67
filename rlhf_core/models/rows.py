"""An experience as rows of model input, and the positions at which response tokens are predicted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..functional.masking import position_ids_of
from .packing import Packing, takes_packed_rows
from .shared_pass import RowLengths

if TYPE_CHECKING:
    from ..types import Experience


def model_rows(model: nn.Module, experience: Experience) -> PaddedRows | PackedRows:
    """The rows for the innermost `model`, packed where it supports that. Both kinds keep the order of actions."""
    rows = _own_prefixes(PaddedRows.of(experience), RowLengths.of(model))
    return PackedRows(rows) if takes_packed_rows(model) else rows


@dataclass(frozen=True)
class PaddedRows:
    """Rows padded to the longest, all starting in the first column (see `shared_pass.py`)."""

    sequences: Tensor
    """[B, W] int64."""
    attention_mask: Tensor
    """[B, W] bool."""
    is_read: Tensor
    """[B, W] bool: True where the next token is an action, which this position predicts."""

    @classmethod
    def of(cls, experience: Experience) -> PaddedRows:
        """Shift every row to the left, and drop unused columns."""
        mask = experience.attention_mask
        width, device = int(mask.sum(1).max()), mask.device
        is_action = torch.zeros_like(mask)
        is_action[:, experience.prompt_length :] = experience.action_mask
        first = experience.prompt_length - mask[:, : experience.prompt_length].sum(1, keepdim=True)
        source = torch.arange(width + 1, device=device) + first
        is_there = source < mask.shape[1]
        source = source.clamp(max=mask.shape[1] - 1)

        def shifted(values: Tensor) -> Tensor:
            """[B, width + 1]; 0 past the last column."""
            return values.gather(1, source) * is_there

        return cls(shifted(experience.sequences)[:, :width], shifted(mask)[:, :width], shifted(is_action)[:, 1:])

    @property
    def inputs(self) -> dict[str, Any]:
        return {
            "input_ids": self.sequences,
            "attention_mask": self.attention_mask.long(),
            "position_ids": position_ids_of(self.attention_mask),
        }

    @property
    def lengths(self) -> Tensor:
        """[B, 1] int64: tokens of each row."""
        return self.attention_mask.sum(1, keepdim=True)

    @property
    def logits_to_keep(self) -> int:
        """Number of last columns that contain all predicting positions."""
        return int((self.is_read.any(0).cumsum(0) > 0).sum().clamp(min=1))

    def of_actions(self, per_position: Tensor) -> Tensor:
        """[B, W, ...] or [B, logits_to_keep, ...] per position -> [N, ...] at the position before each action."""
        return per_position[self.is_read[:, -per_position.shape[1] :]]


class PackedRows:
    """All samples in one row without padding, for a model inside `packed_attention`."""

    def __init__(self, rows: PaddedRows) -> None:
        is_token = rows.attention_mask
        self.inputs: dict[str, Any] = {
            "input_ids": rows.sequences[is_token][None],
            # Four dimensions: transformers takes it for a finished mask and builds no T x T one. Size zero:
            # attention without packing support fails instead of mixing samples.
            "attention_mask": is_token.new_ones(1, 1, 0, 0),
            "position_ids": position_ids_of(is_token)[is_token][None],
            "packing": Packing.of(is_token),
        }
        self.lengths: Tensor = rows.lengths.expand_as(is_token)[is_token][None]
        """[1, T] int64: tokens of the sample that each belongs to."""
        self.logits_to_keep: Tensor = rows.is_read[is_token].nonzero()[:, 0]
        """[N] int64: the position before each action."""

    def of_actions(self, per_position: Tensor) -> Tensor:
        """[1, T, ...], or [1, N, ...] at the kept positions -> [N, ...]. N < T, since no prompt is empty."""
        if per_position.shape[1] == len(self.logits_to_keep):
            return per_position[0]
        return per_position[0, self.logits_to_keep]


def _own_prefixes(rows: PaddedRows, rules: RowLengths | None) -> PaddedRows:
    """Rows in which each action gets the embeddings of its own prefix, as when it was sampled.

    Actions before a switch of `rules` are read from the row cut off at the switch; so a longer row appears twice,
    consecutively, which keeps the order of actions.
    """
    for switch in sorted(() if rules is None else rules.switches):
        if rows.sequences.shape[1] <= switch:
            break
        is_before = torch.arange(rows.sequences.shape[1], device=rows.sequences.device) < switch
        is_split = (rows.lengths[:, 0] > switch) & (rows.is_read & is_before).any(1)
        index = torch.arange(len(is_split), device=is_split.device).repeat_interleave(1 + is_split.long())
        is_cut = torch.ones_like(index, dtype=torch.bool)
        is_cut[1:] = index[1:] != index[:-1]
        is_cut &= is_split[index]
        is_whole = is_split[index] & ~is_cut
        rows = PaddedRows(
            rows.sequences[index],
            rows.attention_mask[index] & ~(is_cut[:, None] & ~is_before),
            rows.is_read[index] & ~(is_cut[:, None] & ~is_before) & ~(is_whole[:, None] & is_before),
        )
    return rows
