"""Rotary embeddings that depend on a row's length, computed separately for each row.

transformers computes `longrope` and `dynamic` NTK for the longest row of a pass, and the latter also for the longest
row seen so far. Inside `own_lengths` its rotary module is called once for each range of lengths that occurs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .replaced_forwards import Forward, replaced_forwards


@dataclass(frozen=True, slots=True)
class RowLengths:
    """How the rotary embeddings of a model change with the length of its row."""

    switches: frozenset[int]
    """Lengths beyond which a prefix has another embedding, the same for all longer ones (`longrope`)."""
    limit: int | None
    """Length beyond which every row length has its own embedding (`dynamic` NTK); None if there is none."""

    @classmethod
    def of(cls, model: nn.Module) -> RowLengths | None:
        """The model's rules, also inside wrappers and critics; None if its embedding is the same at all lengths."""
        pairs = {pair for module in model.modules() for pair in _rotary_parameters(module)}
        if not pairs:
            return None
        limits = [limit for kind, limit in pairs if kind == "dynamic"]
        return cls(frozenset(n for kind, n in pairs if kind == "longrope"), min(limits, default=None))

    @property
    def kind(self) -> str:
        """transformers' name of the kind."""
        return "longrope" if self.switches else "dynamic"

    def begins_anew(self, length: int) -> bool:
        """Whether a row of `length` tokens has other embeddings than with one token fewer.

        The engine makes no row beyond `limit`, which is all the positions such a model has.
        """
        return length - 1 in self.switches


def is_length_dependent(rotary: nn.Module) -> bool:
    """Whether this module itself is a rotary embedding that depends on the longest row."""
    return bool(_rotary_parameters(rotary))


def _rotary_parameters(module: nn.Module) -> list[tuple[str, int]]:
    # `rope_type` and `inv_freq`: transformers' rotary modules, whatever their class is called.
    return _parameters_of(getattr(module, "config", None)) if hasattr(module, "rope_type") else []


def _parameters_of(config: Any) -> list[tuple[str, int]]:
    """For each length-dependent rotary embedding: its kind, and the length up to which it is constant."""
    given = getattr(config, "rope_parameters", None)
    if not isinstance(given, Mapping):
        return []
    layers = [given, *(each for each in given.values() if isinstance(each, Mapping))]
    found = []
    for parameters in layers:
        kind = parameters.get("rope_type")
        if kind == "longrope":
            found.append(("longrope", int(parameters["original_max_position_embeddings"])))
        elif kind == "dynamic":
            found.append(("dynamic", int(config.max_position_embeddings)))
    return found


@contextmanager
def own_lengths(model: nn.Module, lengths: Tensor) -> Iterator[None]:
    """Context in which `model` computes each token's rotary embedding for a row of its given length.

    lengths: [B, S] or [B, 1] int64, tokens of each position's row. Other models are unaffected.
    """
    rules = RowLengths.of(model)
    rotaries = [] if rules is None else [module for module in model.modules() if is_length_dependent(module)]
    ranges = [] if rules is None else _ranges(rules, lengths)
    with replaced_forwards((rotary, _asked_by_length(rotary.forward, ranges)) for rotary in rotaries):
        yield


def _ranges(rules: RowLengths, lengths: Tensor) -> list[tuple[int, Tensor]]:
    """Lengths to compute embeddings for, each with its tokens ([B, S] bool); the first also covers all others."""
    longest = lengths.max().clamp(min=1)
    stands_for = lengths.clamp(min=1)
    upper = [*sorted(rules.switches), *([] if rules.limit is None else [rules.limit])]
    # The longest length of a range stands for the whole range, so that no position of its rows is cut off.
    edges = sorted({min(edge, int(longest)) for edge in upper} | {int(longest)})
    table = torch.tensor(edges, device=lengths.device)
    ranged = table[torch.searchsorted(table, stands_for)]
    if rules.limit is not None:
        ranged = torch.where(stands_for > rules.limit, stands_for, ranged)
    return [(length, ranged == length) for length in ranged.unique().tolist()]


def _asked_by_length(plain: Forward, ranges: list[tuple[int, Tensor]]) -> Forward:
    def forward(x: Tensor, position_ids: Tensor, *args: Any, **options: Any) -> Any:
        mixed: Any = None
        for length, is_meant in ranges:
            # It reads the largest position only. A position of 0 resets the longest row that it has seen.
            plain(x, position_ids.new_zeros(1, 1), *args, **options)
            last = position_ids.new_full((*position_ids.shape[:-1], 1), length - 1)
            asked = torch.cat([position_ids.clamp(max=length - 1), last], dim=-1)
            mixed = _merge(mixed, plain(x, asked, *args, **options), is_meant)
        plain(x, position_ids.new_zeros(1, 1), *args, **options)
        return mixed

    return forward


def _merge(so_far: Any, found: Any, is_meant: Tensor) -> Any:
    """`so_far` with `found` ([B, S + 1, D], or a tuple of such, last position dropped) on the selected tokens."""
    if isinstance(found, tuple):
        before = so_far or (None,) * len(found)
        return tuple(_merge(one, each, is_meant) for one, each in zip(before, found, strict=True))
    values = found[..., :-1, :]
    return values if so_far is None else torch.where(is_meant[..., None], values, so_far)
