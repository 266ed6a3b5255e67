"""What core reads of the section `optimizer`; the other options are those of the optimizer that it names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from .problems import Problem
from .processes import can_hold, strategies_with
from .section import Section

if TYPE_CHECKING:
    from .resolved import ResolvedRun


class OptimizerConfig(Section):
    """What core reads of `optimizer`, for the policy and, with `critic_lr`, for the critic."""

    change_effects: ClassVar[Mapping[str, str]] = {
        "": "holds from the next update on; its moments are kept",
        "name": "its state cannot be read: a run keeps its optimizer",
    }

    lr: float = Field(1e-6, ge=0, description="Peak learning rate of the policy.")
    critic_lr: float | None = Field(None, ge=0, description="Peak learning rate of the critic; null takes lr.")
    schedule: dict[str, Any] = Field(
        default_factory=lambda: {"name": "constant"},
        description="Learning rate after warm-up: a schedule's name, or a mapping with its options.",
    )
    warmup_episodes: int = Field(0, ge=0, description="Episodes over which the learning rate grows from 0.")
    max_grad_norm: float | None = Field(1.0, gt=0, description="Clip the gradient to this global norm; null is off.")

    def check(self, run: ResolvedRun) -> Iterator[Problem]:
        name, strategy = run.optimizer.name, run.strategy
        if not can_hold(strategy.component, name):
            problem = f"strategy {strategy.name} can hold {', '.join(strategy.component.optimizers or ())} only"
            yield Problem("name", f"{problem}, not {name}", strategies_with(lambda each: can_hold(each, name)))
