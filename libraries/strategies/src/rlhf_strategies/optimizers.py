"""The optimizer AdamW, and the schedules constant, linear and cosine, as plugins."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from rlhf_core.components import Component, OptimizerContext, ScheduleContext
from rlhf_core.config.section import Section

if TYPE_CHECKING:
    from torch.optim import Optimizer


class AdamWConfig(Section):
    """`optimizer:` section for `name: adamw`."""

    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.999), description="Adam's decay rates of the running mean and the running square."
    )
    eps: float = Field(1e-8, gt=0, description="Added to Adam's denominator.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay.")


class FloorConfig(Section):
    """Options of the schedules `linear` and `cosine`."""

    floor: float = Field(0.0, ge=0, le=1, description="Final rate, as a fraction of the peak.")


adamw = Component(
    summary="AdamW, in the strategy's own implementation, with float32 master weights for 16-bit parameters",
    config=AdamWConfig,
    build=f"{__name__}:build_adamw",
    trains_16_bit=True,
)
constant = Component("Constant at the peak rate", Section, f"{__name__}:build_constant")
linear = Component(
    "Decays linearly to a floor, 0 by default, at the last episode", FloorConfig, f"{__name__}:build_linear"
)
cosine = Component("Decays along half a cosine to a floor, 0 by default", FloorConfig, f"{__name__}:build_cosine")


def build_adamw(config: AdamWConfig, context: OptimizerContext) -> Optimizer:
    """Build the strategy's own AdamW (Loshchilov 2019)."""
    return context.strategy.make_optimizer(
        context.parameters.values(),
        lr=context.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
    )


def build_constant(config: Section, context: ScheduleContext) -> Callable[[int], float]:
    """Factor 1 for every update."""
    return lambda update: 1.0


def build_linear(config: FloorConfig, context: ScheduleContext) -> Callable[[int], float]:
    """Factor that decays linearly from 1 at the end of warm-up to `floor` after the last update."""
    return lambda update: 1.0 - (1.0 - config.floor) * _progress(update, context)


def build_cosine(config: FloorConfig, context: ScheduleContext) -> Callable[[int], float]:
    """Factor like `build_linear`, along half a cosine period (Loshchilov 2017, arXiv:1608.03983, without restarts)."""
    rest = 1.0 - config.floor
    return lambda update: config.floor + rest * 0.5 * (1.0 + math.cos(math.pi * _progress(update, context)))


def _progress(update: int, context: ScheduleContext) -> float:
    """Fraction of the updates after warm-up that precede `update`."""
    after_warmup = update - context.warmup_updates
    return min(1.0, after_warmup / max(1, context.total_updates - context.warmup_updates))
