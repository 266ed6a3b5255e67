"""An experience as rows of model input, and the positions at which response tokens are predicted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlhf_core.models.kinds import ModelKind, default_kind

if TYPE_CHECKING:
    from rlhf_core.types import Experience


@dataclass(frozen=True)
class PaddedRows:
    """Rows padded to the longest, which all start in the first column (see `shared_pass.py`)."""

    sequences: Tensor
    """[B, W] int64."""
    attention_mask: Tensor
    """[B, W] bool."""
    is_read: Tensor
    """[B, W] bool: True if the next token is an action, which this position predicts."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """Name -> [B, ...]: further model inputs."""
    kind: ModelKind = field(default_factory=default_kind)
    """Kind of the model that receives the rows."""

    @classmethod
    def of(cls, experience: Experience) -> PaddedRows:
        """Shift every row of a batch to the left, and drop unused positions."""
        mask = experience.attention_mask
        width, device = int(mask.sum(1).max()), mask.device
        is_action = torch.zeros_like(mask)
        is_action[:, experience.prompt_length :] = experience.action_mask
        first = experience.prompt_length - mask[:, : experience.prompt_length].sum(1, keepdim=True)
        source = torch.arange(width + 1, device=device) + first
        exists = source < mask.shape[1]
        source = source.clamp(max=mask.shape[1] - 1)

        def shift(values: Tensor) -> Tensor:
            """[B, width + 1], 0 past the last column."""
            return values.gather(1, source) * exists

        return cls(
            shift(experience.sequences)[:, :width],
            shift(mask)[:, :width],
            shift(is_action)[:, 1:],
            experience.columns.model_inputs,
        )

    @property
    def inputs(self) -> dict[str, Any]:
        return {
            "input_ids": self.sequences,
            "attention_mask": self.attention_mask.long(),
            **self.kind.inputs(self.sequences, self.attention_mask, self.columns),
        }

    @property
    def lengths(self) -> Tensor:
        """[B, 1] int64: number of tokens of each row."""
        return self.attention_mask.sum(1, keepdim=True)

    @property
    def logits_to_keep(self) -> int:
        """Number of last columns that contain all predicting positions."""
        return int((self.is_read.any(0).cumsum(0) > 0).sum().clamp(min=1))

    def of_actions(self, per_position: Tensor) -> Tensor:
        """[B, W, ...] or [B, logits_to_keep, ...] per position -> [N, ...] at the position before each action."""
        return per_position[self.is_read[:, -per_position.shape[1] :]]


def with_own_prefixes(rows: PaddedRows, switches: Iterable[int]) -> PaddedRows:
    """Return rows in which each action has the embeddings of the prefix that it was sampled from.

    Actions before a switch (`length_switches`) are read from a copy of the row that ends at the switch. A longer row
    appears twice in succession, which keeps the order of actions.
    """
    for switch in sorted(switches):
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
            {name: values[index] for name, values in rows.columns.items()},
        )
    return rows
