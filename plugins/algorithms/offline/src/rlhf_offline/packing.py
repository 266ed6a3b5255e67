"""Several examples in one row, so that little is padding; none sees another.

A row's position ids start again at 0 with each example; from that transformers makes a causal mask of blocks.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from torch import Tensor, nn

from rlhf_core.errors import UserInputError
from rlhf_core.functional.forward import innermost


def plan_rows(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Which examples share a row, as indices into `lengths` (tokens): first fit, longest first.

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
    """[B, S, V] logits of packed rows ([B, S] int64 both). Raises `UserInputError` for a model that cannot."""
    inner = innermost(model)
    attention = str(getattr(getattr(inner, "config", None), "_attn_implementation", "sdpa"))
    if "position_ids" not in inspect.signature(inner.forward).parameters or attention.startswith("flash"):
        raise UserInputError(
            f"{type(inner).__name__} with {attention} attention cannot keep packed examples apart",
            where="algorithm.packing",
            hint="set algorithm.packing: false (the result is the same)",
        )
    logits: Tensor = model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits
    return logits
