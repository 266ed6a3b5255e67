"""Core's optimizer and schedules."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ..components import Component
from ..config.section import Section


class AdamWConfig(Section):
    """`optimizer:` section for `name: adamw`."""

    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.999), description="Adam's decay of the running mean and of the running square."
    )
    eps: float = Field(1e-8, gt=0, description="Added to Adam's denominator.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay.")


class NoOptions(Section):
    """A schedule without options."""


adamw = Component(
    summary="AdamW, by the strategy's own implementation; float32 master weights of 16-bit parameters",
    config=AdamWConfig,
    build="rlhf_core.optimizers.builtin:adamw",
    trains_16_bit=True,
)
constant = Component("Stays at the peak rate", NoOptions, "rlhf_core.optimizers.builtin:constant")
linear = Component("Falls in a line to 0 at the last episode", NoOptions, "rlhf_core.optimizers.builtin:linear")
cosine = Component("Falls as half a cosine to 0 at the last episode", NoOptions, "rlhf_core.optimizers.builtin:cosine")
