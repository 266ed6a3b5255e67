"""`overlong-penalty`: a soft limit on the length of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def overlong_penalty(rollouts: Sequence[Any], *, max_tokens: int = 1024, buffer_tokens: int = 256) -> list[float]:
    """0 up to `max_tokens - buffer_tokens` response tokens, then decreasing linearly to -1 at `max_tokens` and beyond.

    Soft overlong punishment of DAPO (Yu et al. 2025, equation 13).

    Args:
        rollouts: samples to score.
        max_tokens: length with the full penalty, in tokens.
        buffer_tokens: length of the linear part, in tokens.

    Raises:
        ValueError: unless 0 < buffer_tokens <= max_tokens.

    Example:
        >>> from types import SimpleNamespace
        >>> answers = [SimpleNamespace(sampled_ids=range(n)) for n in (768, 896, 1200)]
        >>> overlong_penalty(answers, max_tokens=1024, buffer_tokens=256)
        [-0.0, -0.5, -1.0]
    """
    if not 0 < buffer_tokens <= max_tokens:
        raise ValueError(f"0 < buffer_tokens <= max_tokens is needed, got {buffer_tokens} and {max_tokens}")
    free_tokens = max_tokens - buffer_tokens
    return [-min(1.0, max(0.0, (len(each.sampled_ids) - free_tokens) / buffer_tokens)) for each in rollouts]
