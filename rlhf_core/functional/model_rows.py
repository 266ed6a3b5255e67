"""An experience as a model is given it, and where what the model says of its response tokens is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .logprobs import response_logits
from .masking import position_ids_of
from .packing import Packing, takes_packed_rows

if TYPE_CHECKING:
    from ..types import Experience


def model_rows(model: nn.Module, experience: Experience) -> PaddedRows | PackedRows:
    """The rows for the innermost `model`: packed where it takes them. Actions come in the same order in both."""
    return PackedRows(experience) if takes_packed_rows(model) else PaddedRows.of(experience)


@dataclass(frozen=True)
class PaddedRows:
    """As wide as the longest of them, all ending in the last column."""

    sequences: Tensor
    """[B, W] int64."""
    attention_mask: Tensor
    """[B, W] bool."""
    action_mask: Tensor
    """[B, A] bool over the last A columns."""

    @classmethod
    def of(cls, experience: Experience) -> PaddedRows:
        """Shift every row to the right until it ends in the last column, and drop the columns nobody needs.

        An experience is as wide as its longest prompt and its longest response together, which need not be of one
        row: short prompts with long answers beside long prompts with short ones would be padding by half.
        """
        sequences, attention_mask, action_mask = experience.sequences, experience.attention_mask, experience.action_mask
        width, longest = sequences.shape[1], int(attention_mask.sum(1).max())
        if longest == width:
            return cls(sequences, attention_mask, action_mask)
        behind = experience.num_actions - attention_mask[:, experience.prompt_length :].sum(1, keepdim=True)

        def shifted(values: Tensor, first: int) -> tuple[Tensor, Tensor]:
            """The columns from `first` on, and which of them were there before."""
            source = torch.arange(first, values.shape[1], device=values.device) - behind
            return values.gather(1, source.clamp(min=0)), source >= 0

        ids, _ = shifted(sequences, width - longest)
        attended, is_attended = shifted(attention_mask, width - longest)
        acted, is_action = shifted(action_mask, 0)
        return cls(ids, attended & is_attended, acted & is_action)

    @property
    def inputs(self) -> dict[str, Any]:
        return {
            "input_ids": self.sequences,
            "attention_mask": self.attention_mask.long(),
            "position_ids": position_ids_of(self.attention_mask),
        }

    @property
    def logits_to_keep(self) -> int:
        return self.action_mask.shape[1] + 1

    def of_actions(self, per_position: Tensor) -> Tensor:
        """[B, W, ...], or [B, logits_to_keep, ...], of each position -> [N, ...], what stands before each action."""
        return response_logits(per_position, self.action_mask.shape[1])[self.action_mask]


class PackedRows:
    """All samples in one row without padding, for a model inside `packed_attention`."""

    def __init__(self, experience: Experience) -> None:
        is_token = experience.attention_mask
        is_action = torch.zeros_like(is_token)
        is_action[:, experience.prompt_length :] = experience.action_mask
        self.inputs: dict[str, Any] = {
            "input_ids": experience.sequences[is_token][None],
            # Four dimensions: transformers takes it for a mask that is made already, and builds none of T x T. Of no
            # size: attention that does not know of packing fails instead of mixing samples.
            "attention_mask": is_token.new_ones(1, 1, 0, 0),
            "position_ids": position_ids_of(is_token)[is_token][None],
            "packing": Packing.of(is_token),
        }
        self.logits_to_keep: Tensor = is_action[is_token].nonzero()[:, 0] - 1
        """[N] int64: the position before each action."""

    def of_actions(self, per_position: Tensor) -> Tensor:
        """[1, T, ...], or [1, N, ...] of the positions to keep, -> [N, ...]. N < T: no prompt is empty."""
        if per_position.shape[1] == len(self.logits_to_keep):
            return per_position[0]
        return per_position[0, self.logits_to_keep]
