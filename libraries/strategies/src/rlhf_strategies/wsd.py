"""The schedule WSD: warm-up, stable, decay (Hu 2024, arXiv:2404.06395)."""

from __future__ import annotations

import math
from collections.abc import Callable

from rlhf_core.components import ScheduleContext

from .more_optimizers import WsdConfig


def build(config: WsdConfig, context: ScheduleContext) -> Callable[[int], float]:
    """Factor 1 until the last part of the updates, in which it falls to `floor` after the last one.

    Args:
        config: Options.
        context: Number of updates.

    Returns:
        The factor of an update.
    """
    number = max(1, round(config.decay * context.total_updates))
    start = max(context.total_updates - number, context.warmup_updates)

    def factor(update: int) -> float:
        done = min(1.0, max(0.0, (update - start) / max(1, context.total_updates - start)))
        left = {"linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done)), "sqrt": 1.0 - math.sqrt(done)}
        return config.floor + (1.0 - config.floor) * left[config.shape]

    return factor
