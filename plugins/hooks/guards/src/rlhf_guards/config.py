"""The section `guards` of a run file: watched values, their bounds, and the action when one is crossed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from rlhf_core.components import Component
from rlhf_core.config import Problem, Section

if TYPE_CHECKING:
    from rlhf_core.config import ResolvedRun

Grave = Literal["skip", "stop", "rollback"]
Action = Literal["warn", "skip", "stop", "rollback", "finish"]

_ACTION = (
    "warn: say so and go on; skip: leave out the rest of the episode's updates; stop: end the run as failed; "
    "rollback: go back to the last good checkpoint with a smaller learning rate; finish: end the run as done."
)


class NonFiniteGuard(Section):
    """A loss, gradient or reward that is NaN or infinite. Its update is never made."""

    action: Grave = Field(
        "stop", description="skip: leave out this update; stop: end the run; rollback: to the last good checkpoint."
    )


class KLGuard(Section):
    """The policy has moved too far from the reference."""

    action: Action = Field("stop", description=_ACTION)
    bound: float | None = Field(None, gt=0, description="Most `kl/mean`, in nats a token; null is off.")


class EntropyGuard(Section):
    """The policy has become certain of everything and no longer explores."""

    action: Action = Field("warn", description=_ACTION)
    bound: float | None = Field(None, gt=0, description="Least `policy/entropy`, in nats a token; null is off.")


class PlateauGuard(Section):
    """The mean reward has not improved for a while."""

    action: Action = Field("warn", description=_ACTION)
    episodes: int | None = Field(None, ge=1, description="Episodes without improvement that trip it; null is off.")
    min_improvement: float = Field(0.0, ge=0, description="`reward/mean` has to rise by more than this to count.")


class LogProbGapGuard(Section):
    """Trainer and engine disagree about the probability of what was sampled."""

    action: Action = Field("warn", description=_ACTION)
    bound: float | None = Field(1.0, gt=0, description="Most `rollout/logprob_gap_max`, in nats; null is off.")


class RollbackConfig(Section):
    """How a guard's `rollback` is done."""

    lr_factor: float = Field(0.5, gt=0, le=1, description="Every learning rate is multiplied by it at each rollback.")
    max_times: int = Field(3, ge=1, description="Rollbacks of one run; the next one that is asked for ends it.")


class GuardsConfig(Section):
    """The guards of a run and their bounds."""

    active_when_absent: ClassVar[bool] = True
    non_finite: NonFiniteGuard = Field(default_factory=NonFiniteGuard)
    kl: KLGuard = Field(default_factory=KLGuard)
    entropy: EntropyGuard = Field(default_factory=EntropyGuard)
    plateau: PlateauGuard = Field(default_factory=PlateauGuard)
    log_prob_gap: LogProbGapGuard = Field(default_factory=LogProbGapGuard)
    rollback: RollbackConfig = Field(default_factory=RollbackConfig)

    def check(self, run: ResolvedRun) -> Iterator[Problem]:
        if self.rolling_back and run.run.checkpoint.keep < 2:
            yield Problem(
                self.rolling_back[0],
                "may roll back past the newest checkpoint, which may be bad already: set checkpoint.keep to 2 or more",
            )

    @property
    def enabled(self) -> dict[str, Any]:
        """Name -> options of the guards that are on: those of which none is null."""
        guards = {name: getattr(self, name) for name in type(self).model_fields if name != "rollback"}
        return {name: guard for name, guard in guards.items() if None not in dict(guard).values()}

    @property
    def rolling_back(self) -> list[str]:
        """Names of the guards that are on and may roll the run back."""
        return [name for name, guard in self.enabled.items() if guard.action == "rollback"]


guards = Component(
    summary="Watches losses, KL, entropy and rewards, and acts when a bound is crossed.", config=GuardsConfig
)
