"""The schedule `restarts`: `optimizer: {schedule: {name: restarts, cycles: 2}}`."""

import math
from collections.abc import Callable

from rlhf_core.components import ScheduleContext

from .config import RestartsConfig


def build(config: RestartsConfig, context: ScheduleContext) -> Callable[[int], float]:
    """Return a function from an update's index to the factor of its learning rate.

    Core calls it for updates after the warm-up, in any order, so it is stateless.
    """
    updates = max(1, context.total_updates - context.warmup_updates)

    def factor(update: int) -> float:
        done = config.cycles * (update - context.warmup_updates) / updates
        return 0.5 * (1.0 + math.cos(math.pi * (done % 1.0)))

    return factor
