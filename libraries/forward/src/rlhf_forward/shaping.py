"""Logits of the distribution that tokens were sampled from: with penalties, and without tokens that are not allowed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .sampling_options import BANNED, PRESENCE, REPETITION
from .structure import STRUCTURE
from .structure_columns import structured_actions

if TYPE_CHECKING:
    from rlhf_core.types import Experience


def penalized(
    logits: Tensor, *, seen: Tensor, generated: Tensor | None, repetition: Tensor | float, presence: Tensor | float
) -> Tensor:
    """Apply the repetition penalty (Keskar 2019, CTRL), then the presence penalty, before the temperature.

    Args:
        logits: [N, V] of any float dtype.
        seen: [N, V] bool: tokens of the prompt and the answer so far. Positive logits are divided by `repetition`, and
            others are multiplied.
        generated: [N, V] bool: tokens of the answer so far, from whose logits `presence` is subtracted. None: it is 0.
        repetition: > 0, one number or [N, 1]. 1 is off.
        presence: One number or [N, 1]. 0 is off.

    Returns:
        [N, V] float32.

    Example:
        >>> both = torch.tensor([[True, True, False]])
        >>> logits = torch.tensor([[2.0, -1.0, 3.0]])
        >>> penalized(logits, seen=both, generated=~both, repetition=2.0, presence=0.5)
        tensor([[ 1.0000, -2.0000,  2.5000]])
    """
    logits = logits.float()
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    penalized_logits = torch.where(seen, repeated, logits)
    return penalized_logits if generated is None else penalized_logits - presence * generated


def without_banned(logits: Tensor, banned_ids: Tensor) -> Tensor:
    """Replace the logits of banned tokens by -inf.

    Args:
        logits: [N, V] of any float dtype.
        banned_ids: [N, K] int, -1 = padding.

    Returns:
        [N, V] float32.

    Example:
        >>> without_banned(torch.zeros(1, 3), torch.tensor([[2, -1]]))
        tensor([[0., 0., -inf]])
    """
    number, size = logits.shape
    is_banned = torch.zeros(number, size + 1, dtype=torch.bool, device=logits.device)
    ids = torch.where(banned_ids >= 0, banned_ids, size).long()
    return logits.float().masked_fill(is_banned.scatter(-1, ids, True)[:, :size], -torch.inf)


def is_shaped(experience: Experience) -> bool:
    """Whether tokens of a batch were sampled with penalties, banned tokens or a structure.

    Args:
        experience: A batch.
    """
    return not experience.columns.keys().isdisjoint((REPETITION, PRESENCE, BANNED, STRUCTURE))


def shaped_actions(model: nn.Module, logits: Tensor, experience: Experience) -> Tensor:
    """Return the logits that the actions of a batch were sampled from, before the temperature.

    Args:
        model: The innermost model. The tokenizer of its kind determines the tokens that a structure allows.
        logits: [N, V], at the N True positions of the action mask, in their order.
        experience: The batch.

    Returns:
        [N, V] float32, and `logits` itself if nothing shaped them.
    """
    columns, mask, size = experience.columns, experience.action_mask, logits.shape[-1]
    if REPETITION in columns or PRESENCE in columns:
        off, start = torch.zeros(mask.shape, device=mask.device), experience.prompt_length
        repetition, presence = (columns.get(name, off)[mask].unsqueeze(-1) for name in (REPETITION, PRESENCE))
        generated = None
        if bool(presence.any()):
            # All tokens of the response, also those that a correction has dropped from the action mask.
            attention = experience.attention_mask[:, start:]
            generated = _before_actions(experience.sequences[:, start:], attention, mask, 0, size)
        logits = penalized(
            logits,
            seen=_before_actions(experience.sequences, experience.attention_mask, mask, start, size),
            generated=generated,
            repetition=torch.where(repetition > 0, repetition, 1.0),
            presence=presence,
        )
    if BANNED in columns:
        logits = without_banned(logits, columns[BANNED][mask])
    if STRUCTURE in columns:
        logits = structured_actions(model, logits, experience)
    return logits


def _before_actions(ids: Tensor, is_real: Tensor, action_mask: Tensor, start: int, size: int) -> Tensor:
    """[N, V] bool: whether a row has the token before each of its actions. `start`: column of the first response token.

    One row at a time, so that only the result has V columns for each action.
    """
    width = ids.shape[1]
    places = torch.arange(width, dtype=torch.int32, device=ids.device)
    found = []
    for row in range(ids.shape[0]):
        real = torch.where(is_real[row], places, width)
        first = torch.full((size,), width, dtype=torch.int32, device=ids.device)
        first = first.scatter_reduce(0, torch.where(is_real[row], ids[row], 0), real, "amin")
        found.append(first < (action_mask[row].nonzero() + start))
    return torch.cat(found)
