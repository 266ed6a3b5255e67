"""Rotary embeddings that depend on a row's length, computed separately for each row.

transformers computes `longrope` and `dynamic` NTK for the longest row of a pass, and the latter also for the longest
row seen so far. Inside `own_lengths` its rotary module is called once for each length that occurs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .replaced_forwards import Forward, replaced_forwards


def length_switches(model: nn.Module) -> frozenset[int] | None:
    """None where the model's rotary embedding is the same at all lengths, also inside wrappers and critics.

    Otherwise the lengths beyond which a prefix has another embedding than up to them (`longrope`). `dynamic` NTK has
    none: it changes beyond all the positions such a model has.
    """
    found = [each for module in model.modules() if (each := _switches_of(module)) is not None]
    return frozenset().union(*found) if found else None


def _switches_of(module: nn.Module) -> frozenset[int] | None:
    """Of this module itself."""
    # `rope_type` and `inv_freq`: transformers' rotary modules, whatever their class is called.
    given = getattr(getattr(module, "config", None), "rope_parameters", None) if hasattr(module, "rope_type") else None
    if not isinstance(given, Mapping):
        return None
    layers = [given, *(each for each in given.values() if isinstance(each, Mapping))]
    long = [each for each in layers if each.get("rope_type") == "longrope"]
    if not long and all(each.get("rope_type") != "dynamic" for each in layers):
        return None
    return frozenset(int(each["original_max_position_embeddings"]) for each in long)


@contextmanager
def own_lengths(model: nn.Module, lengths: Tensor) -> Iterator[None]:
    """Context in which `model` computes each token's rotary embedding for a row of its given length.

    lengths: [B, S] or [B, 1] int64, tokens of each position's row. Other models are unaffected.
    """
    rotaries = [module for module in model.modules() if _switches_of(module) is not None]
    with replaced_forwards((rotary, _by_length(rotary.forward, lengths.clamp(min=1))) for rotary in rotaries):
        yield


def _by_length(plain: Forward, lengths: Tensor) -> Forward:
    def forward(x: Tensor, position_ids: Tensor, *args: Any, **options: Any) -> Any:
        own = lengths.expand(-1, position_ids.shape[-1])
        places, start = position_ids.expand_as(own), position_ids.new_zeros(1, 1)
        found: Any = None
        for length in own.unique().tolist():
            is_meant = own == length
            # It reads the largest position only. A position of 0 resets the longest row that it has seen.
            plain(x, start, *args, **options)
            asked = torch.cat([places[is_meant].clamp(max=length - 1), places.new_tensor([length - 1])])
            found = _placed(found, plain(x, asked[None], *args, **options), is_meant)
        plain(x, start, *args, **options)
        return found

    return forward


def _placed(so_far: Any, found: Any, is_meant: Tensor) -> Any:
    """`so_far` with `found` ([1, N + 1, D], or a tuple of such, last position dropped) on the N selected tokens."""
    if isinstance(found, tuple):
        before = so_far or (None,) * len(found)
        return tuple(_placed(one, each, is_meant) for one, each in zip(before, found, strict=True))
    values = found.new_zeros(*is_meant.shape, found.shape[-1]) if so_far is None else so_far
    values[is_meant] = found[0, :-1]
    return values
