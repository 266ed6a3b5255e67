"""Logits of the distribution that tokens were sampled from: with penalties, and without banned tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .sampling_options import BANNED, PRESENCE, REPETITION

if TYPE_CHECKING:
    from rlhf_core.types import Experience


def penalized(
    logits: Tensor, *, seen: Tensor, generated: Tensor, repetition: Tensor | float, presence: Tensor | float
) -> Tensor:
    """Apply the repetition penalty (Keskar 2019, CTRL), then the presence penalty, before the temperature.

    Args:
        logits: [N, V] of any float dtype.
        seen: [N, V] bool: tokens of the prompt and the answer so far. Positive logits are divided by `repetition`, and
            others are multiplied.
        generated: [N, V] bool: tokens of the answer so far, from whose logits `presence` is subtracted.
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
    return torch.where(seen, repeated, logits) - presence * generated


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
    """Whether tokens of a batch were sampled with penalties or banned tokens.

    Args:
        experience: A batch.
    """
    return not experience.columns.keys().isdisjoint((REPETITION, PRESENCE, BANNED))


def shaped_actions(logits: Tensor, experience: Experience) -> Tensor:
    """Return the logits that the actions of a batch were sampled from, before the temperature.

    Args:
        logits: [N, V], at the N True positions of the action mask, in their order.
        experience: The batch.

    Returns:
        [N, V] float32, and `logits` itself if nothing shaped them.
    """
    columns, mask = experience.columns, experience.action_mask
    if REPETITION in columns or PRESENCE in columns:
        off = torch.zeros(mask.shape, device=mask.device)
        repetition = columns.get(REPETITION, off)[mask].unsqueeze(-1)
        start = experience.prompt_length
        everything = _first_place(experience.sequences, experience.attention_mask, logits.shape[-1])
        answer = _first_place(experience.sequences[:, start:], mask, logits.shape[-1])
        row, place = mask.nonzero(as_tuple=True)
        logits = penalized(
            logits,
            seen=everything[row] < (place + start).unsqueeze(-1),
            generated=answer[row] < place.unsqueeze(-1),
            repetition=torch.where(repetition > 0, repetition, 1.0),
            presence=columns.get(PRESENCE, off)[mask].unsqueeze(-1),
        )
    if BANNED in columns:
        logits = without_banned(logits, columns[BANNED][mask])
    return logits


def _first_place(ids: Tensor, mask: Tensor, size: int) -> Tensor:
    """[B, V] int64: first position of each id among the True positions of a row, or the row's width."""
    width = ids.shape[1]
    places = torch.arange(width, device=ids.device).expand_as(ids)
    first = torch.full((ids.shape[0], size), width, device=ids.device)
    return first.scatter_reduce(1, torch.where(mask, ids, 0), torch.where(mask, places, width), "amin")
