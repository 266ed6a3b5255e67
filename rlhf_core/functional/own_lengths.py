"""Rotary embeddings that depend on a row's length, computed for each row by itself.

transformers computes `longrope` and `dynamic` NTK for the longest row of a pass, and the latter also for the longest
row there ever was. Inside `own_lengths` a module of theirs is asked once for each kind of length that occurs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..shared_pass import RowLengths, is_length_dependent


@contextmanager
def own_lengths(model: nn.Module, lengths: Tensor) -> Iterator[None]:
    """Inside, a forward of `model` takes each token for one of a row of so many tokens.

    lengths: [B, S] int64, or [B, 1], of the positions the model is given. Nothing changes for other models.
    """
    rules = RowLengths.of(model)
    with ExitStack() as stack:
        if rules is not None:
            for module in model.modules():
                if is_length_dependent(module):
                    stack.enter_context(_asked_by_length(module, _ranges(rules, lengths)))
        yield


def _ranges(rules: RowLengths, lengths: Tensor) -> list[tuple[int, Tensor]]:
    """The lengths to ask for, and which tokens ([B, S] bool) each is for; the first is for all others too."""
    longest = lengths.max().clamp(min=1)
    stands_for = lengths.clamp(min=1)
    upper = [*sorted(rules.switches), *([] if rules.limit is None else [rules.limit])]
    # A length within a range stands for the longest of the range, so that no position of its rows is cut off.
    edges = sorted({min(edge, int(longest)) for edge in upper} | {int(longest)})
    table = torch.tensor(edges, device=lengths.device)
    ranged = table[torch.searchsorted(table, stands_for)]
    if rules.limit is not None:
        ranged = torch.where(stands_for > rules.limit, stands_for, ranged)
    return [(length, ranged == length) for length in ranged.unique().tolist()]


@contextmanager
def _asked_by_length(rotary: nn.Module, ranges: list[tuple[int, Tensor]]) -> Iterator[None]:
    plain = rotary.forward

    def forward(x: Tensor, position_ids: Tensor, *args: Any, **options: Any) -> Any:
        mixed: Any = None
        for length, is_meant in ranges:
            # It looks at the largest position only. One of 0 makes it forget a longer row that it saw before.
            plain(x, position_ids.new_zeros(1, 1), *args, **options)
            last = position_ids.new_full((*position_ids.shape[:-1], 1), length - 1)
            asked = torch.cat([position_ids.clamp(max=length - 1), last], dim=-1)
            mixed = _merge(mixed, plain(x, asked, *args, **options), is_meant)
        plain(x, position_ids.new_zeros(1, 1), *args, **options)
        return mixed

    rotary.forward = forward
    try:
        yield
    finally:
        del rotary.forward


def _merge(so_far: Any, found: Any, is_meant: Tensor) -> Any:
    """`found` ([B, S + 1, D], or a tuple of such) without its last position, on the tokens that are meant."""
    if isinstance(found, tuple):
        before = so_far or (None,) * len(found)
        return tuple(_merge(one, each, is_meant) for one, each in zip(before, found, strict=True))
    values = found[..., :-1, :]
    return values if so_far is None else torch.where(is_meant[..., None], values, so_far)
