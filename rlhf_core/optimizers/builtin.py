"""AdamW, and the constant, linear and cosine schedules."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..components import OptimizerContext, ScheduleContext
from .plugin import AdamWConfig, NoOptions

if TYPE_CHECKING:
    from torch.optim import Optimizer


def adamw(config: AdamWConfig, context: OptimizerContext) -> Optimizer:
    """The strategy's own AdamW (Loshchilov 2019)."""
    return context.strategy.make_optimizer(
        context.parameters.values(),
        lr=context.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
    )


def constant(config: NoOptions, context: ScheduleContext) -> Callable[[int], float]:
    """1 for every update."""
    return lambda update: 1.0


def linear(config: NoOptions, context: ScheduleContext) -> Callable[[int], float]:
    """From 1 at the end of warm-up to 0 after the last update."""
    return lambda update: 1.0 - _progress(update, context)


def cosine(config: NoOptions, context: ScheduleContext) -> Callable[[int], float]:
    """As `linear`, along half a period of a cosine (Loshchilov 2017, arXiv:1608.03983, without restarts)."""
    return lambda update: 0.5 * (1.0 + math.cos(math.pi * _progress(update, context)))


def _progress(update: int, context: ScheduleContext) -> float:
    """Share of the updates after warm-up that come before `update`."""
    after_warmup = update - context.warmup_updates
    return min(1.0, after_warmup / max(1, context.total_updates - context.warmup_updates))
