"""Distribution of rows over forward passes so that rows with the same beginning share a pass."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlhf_core.batching import plan_micro_batches
from rlhf_core.types import BufferItem

from .prefix_tree import num_shared_tokens
from .shared_rows import MIN_SAVED_SHARE

if TYPE_CHECKING:
    from numpy.typing import NDArray

Unit = Sequence[Any]


def shared_plan(units: Sequence[Unit], max_tokens: int, max_shared_tokens: int) -> list[list[int]] | None:
    """Distribute the units of a rank over passes, the answers to a prompt together.

    Args:
        units: Rows that must share a pass.
        max_tokens: Maximum number of tokens of a pass, with shared beginnings counted once.
        max_shared_tokens: The same for units of one prompt, at least `max_tokens`.

    Returns:
        Indices into `units`, or None if shared beginnings save too few tokens.
    """
    if not all(_has_tokens(row) for unit in units for row in unit):
        return None
    parts: list[list[int]] = []
    for group in _groups(units):
        parts += _parts(group, units, max_shared_tokens)
    costs = [_cost(part, units) for part in parts]
    if sum(costs) > (1 - MIN_SAVED_SHARE) * sum(row.num_tokens for unit in units for row in unit):
        return None
    plans = plan_micro_batches(costs, max_tokens, sum)
    return [[index for part in plan for index in parts[part]] for plan in plans]


def _has_tokens(row: object) -> bool:
    """Whether it is a sample whose model receives its tokens only."""
    return isinstance(row, BufferItem) and not row.columns.model_inputs


def _groups(units: Sequence[Unit]) -> list[list[int]]:
    """Indices of units by the prompt of their first row."""
    groups: dict[int, list[int]] = {}
    for index, unit in enumerate(units):
        groups.setdefault(unit[0].group_id, []).append(index)
    return list(groups.values())


def _parts(group: list[int], units: Sequence[Unit], max_tokens: int) -> list[list[int]]:
    """Split units of one prompt into few adjacent parts within `max_tokens`, if possible of about equal size."""
    fewest = max(1, ceil(_cost(group, units) / max_tokens))
    for count in range(fewest, min(fewest + 3, len(group))):
        even = [part.tolist() for part in np.array_split(np.asarray(group), count)]
        if all(_cost(part, units) <= max_tokens for part in even):
            return even
    parts = [group[:1]]
    for index in group[1:]:
        if _cost([*parts[-1], index], units) <= max_tokens:
            parts[-1].append(index)
        else:
            parts.append([index])
    return parts


def _cost(part: Sequence[int], units: Sequence[Unit]) -> int:
    """Tokens of a pass over these units."""
    rows = [torch.cat([row.prompt_ids, row.response_ids]) for index in part for row in units[index]]
    padded: NDArray[np.int64] = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).numpy()
    return num_shared_tokens(padded, [len(row) for row in rows])
