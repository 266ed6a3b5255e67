"""Rotary embeddings that depend on a row's length, computed separately for each row.

transformers computes `longrope` and `dynamic` NTK for the longest row of a pass, and the latter also for the longest
row seen so far. Inside `own_lengths` its rotary module is called once per length that occurs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .replaced_forwards import Forward, replaced_forwards


def length_switches(model: nn.Module) -> frozenset[int] | None:
    """Return the lengths at which the rotary embedding of a model changes.

    Args:
        model: Any model, also with wrappers, or a critic.

    Returns:
        Lengths (tokens) beyond which a prefix has a different embedding (`longrope`), empty for `dynamic` NTK, whose
        embedding changes only beyond the model's positions. None if the embedding does not depend on the length.
    """
    switches = [each for module in model.modules() if (each := _switches_of(module)) is not None]
    return frozenset().union(*switches) if switches else None


def _switches_of(module: nn.Module) -> frozenset[int] | None:
    """`length_switches` of this module itself."""
    # The attribute `rope_type` identifies transformers' rotary modules, independent of their class.
    rope = getattr(getattr(module, "config", None), "rope_parameters", None) if hasattr(module, "rope_type") else None
    if not isinstance(rope, Mapping):
        return None
    layers = [rope, *(each for each in rope.values() if isinstance(each, Mapping))]
    long = [each for each in layers if each.get("rope_type") == "longrope"]
    if not long and all(each.get("rope_type") != "dynamic" for each in layers):
        return None
    return frozenset(int(each["original_max_position_embeddings"]) for each in long)


@contextmanager
def own_lengths(model: nn.Module, lengths: Tensor) -> Iterator[None]:
    """Return a context in which a model computes the rotary embedding of each token for the length of the token's row.

    Args:
        model: Any model. Unaffected if its embedding does not depend on the length.
        lengths: [B, S] or [B, 1] int64, number of tokens of the row that each position belongs to.
    """
    rotaries = [module for module in model.modules() if _switches_of(module) is not None]
    with replaced_forwards((rotary, _by_length(rotary.forward, lengths.clamp(min=1))) for rotary in rotaries):
        yield


def _by_length(plain: Forward, lengths: Tensor) -> Forward:
    def forward(x: Tensor, position_ids: Tensor, *args: Any, **options: Any) -> Any:
        expanded = lengths.expand(-1, position_ids.shape[-1])
        places, start = position_ids.expand_as(expanded), position_ids.new_zeros(1, 1)
        result: Any = None
        for length in expanded.unique().tolist():
            is_selected = expanded == length
            # The module reads only the largest position. A position of 0 resets the longest row that it has seen.
            plain(x, start, *args, **options)
            selected = torch.cat([places[is_selected].clamp(max=length - 1), places.new_tensor([length - 1])])
            result = _insert(result, plain(x, selected[None], *args, **options), is_selected)
        plain(x, start, *args, **options)
        return result

    return forward


def _insert(result: Any, part: Any, is_selected: Tensor) -> Any:
    """Write `part` ([1, N + 1, D], or a tuple of such tensors, without the last position) to the N selected tokens."""
    if isinstance(part, tuple):
        results = result or (None,) * len(part)
        return tuple(_insert(one, each, is_selected) for one, each in zip(results, part, strict=True))
    values = part.new_zeros(*is_selected.shape, part.shape[-1]) if result is None else result
    values[is_selected] = part[0, :-1]
    return values
