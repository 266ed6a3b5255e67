"""Packs several examples into one row to save padding; examples do not attend to one another.

A row's position ids start again at 0 with each example; from that transformers makes a causal mask of blocks.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rlhf_core.errors import UserInputError
from rlhf_forward import carries_state, innermost, own_lengths


def plan_rows(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Rows of examples, as indices into `lengths` (tokens): first fit, longest first.

    A row holds at most `max_tokens`, or one longer example.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fitting = next((row for row, left in enumerate(room) if lengths[index] <= left), None)
        if fitting is None:
            rows.append([index])
            room.append(max_tokens - lengths[index])
        else:
            rows[fitting].append(index)
            room[fitting] -= lengths[index]
    return rows


def packed_logits(model: nn.Module, input_ids: Tensor, position_ids: Tensor) -> Tensor:
    """[B, S, V] logits of packed rows (both [B, S] int64). Raises `UserInputError` for a model without this support."""
    inner = innermost(model)
    attention = str(getattr(getattr(inner, "config", None), "_attn_implementation", "sdpa"))
    takes_positions = "position_ids" in inspect.signature(inner.forward).parameters
    if not takes_positions or attention.startswith("flash") or carries_state(inner.config):
        raise UserInputError(
            f"{type(inner).__name__} with {attention} attention cannot keep packed examples apart",
            where="algorithm.packing",
            hint="set algorithm.packing: false (the result is the same)",
        )
    with own_lengths(inner, example_lengths(position_ids)):
        logits: Tensor = model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits
    return logits


def example_lengths(position_ids: Tensor) -> Tensor:
    """[B, S] int64: tokens of the example that each position belongs to; each begins where `position_ids` is 0."""
    number = (position_ids == 0).long().cumsum(1) - 1
    return torch.zeros_like(number).scatter_add(1, number, torch.ones_like(number)).gather(1, number)
