"""Cuts a set of prompts into prefill batches of nearly equal lengths."""

from __future__ import annotations

from collections.abc import Sequence

MAX_PADDING = 0.15
"""Share of a batch that may be padding..."""
FREE_PADDING = 128
"""...or this many tokens, which cost a small model less time than a separate call."""
MAX_LENGTHS = 8
"""Different lengths in a batch: logits are computed at each of them for every row."""


def plan_prefill(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices into `lengths`, grouped so that each group pads to its longest prompt with little waste.

    A group holds at most `max_tokens` tokens, padding included, or one prompt.
    """
    groups: list[list[int]] = []
    group: list[int] = []
    used = 0
    distinct: set[int] = set()
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        length = lengths[index]
        padded = length * (len(group) + 1)
        fits = (
            padded <= max_tokens
            and padded - used - length <= max(FREE_PADDING, MAX_PADDING * padded)
            and (length in distinct or len(distinct) < MAX_LENGTHS)
        )
        if group and not fits:
            groups.append(group)
            group, used, distinct = [], 0, set()
        group.append(index)
        used += length
        distinct.add(length)
    if group:
        groups.append(group)
    return groups
