"""The sections `guards` (watched values, their bounds, and the action if one is crossed) and `train.max_hours`."""

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

TIME_LIMIT = "time-limit"
"""Name of the hook plugin that reads `train.max_hours`."""
_ACTION = (
    "warn: log a warning. skip: omit the rest of the episode's updates. stop: end the run as failed. "
    "rollback: return to the last good checkpoint with a smaller learning rate. finish: end the run as done."
)


class NonFiniteGuard(Section):
    """Triggers if a loss, gradient norm or reward is NaN or infinite. Its update is never applied."""

    action: Grave = Field(
        "stop", description="skip: omit this update. stop: end the run. rollback: return to the last good checkpoint."
    )


class KLGuard(Section):
    """Triggers if the policy has moved too far from the reference."""

    action: Action = Field("stop", description=_ACTION)
    bound: float | None = Field(None, gt=0, description="Maximum `kl/mean`, in nats per token. null: off.")


class EntropyGuard(Section):
    """Triggers if the policy's entropy is so low that it no longer explores."""

    action: Action = Field("warn", description=_ACTION)
    bound: float | None = Field(None, gt=0, description="Minimum `policy/entropy`, in nats per token. null: off.")


class PlateauGuard(Section):
    """Triggers if the mean reward has not improved for a number of episodes."""

    action: Action = Field("warn", description=_ACTION)
    episodes: int | None = Field(None, ge=1, description="Episodes without improvement that trigger it. null: never.")
    min_improvement: float = Field(0.0, ge=0, description="Rise of `reward/mean` above which it counts as improved.")


class LogProbGapGuard(Section):
    """Triggers if trainer and engine disagree about the probabilities of sampled tokens."""

    action: Action = Field("warn", description=_ACTION)
    bound: float | None = Field(1.0, gt=0, description="Maximum `rollout/logprob_gap_max`, in nats. null: off.")


class RollbackConfig(Section):
    """Options of the action `rollback`."""

    lr_factor: float = Field(0.5, gt=0, le=1, description="Factor of every learning rate at each rollback.")
    max_times: int = Field(3, ge=1, description="Maximum number of rollbacks of a run. A further one ends the run.")


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
                "may roll back past the newest checkpoint, which may already be bad: set checkpoint.keep to 2 or more",
            )

    @property
    def enabled(self) -> dict[str, Any]:
        """Options of the enabled guards by name: those without an option that is null."""
        guards = {name: getattr(self, name) for name in type(self).model_fields if name != "rollback"}
        return {name: guard for name, guard in guards.items() if None not in dict(guard).values()}

    @property
    def rolling_back(self) -> list[str]:
        """Names of the enabled guards that may roll the run back."""
        return [name for name, guard in self.enabled.items() if guard.action == "rollback"]


guards = Component(
    summary="Watches losses, KL, entropy and rewards, and acts when a bound is crossed.", config=GuardsConfig
)


class MaxHoursConfig(Section):
    """The time after which a run ends with a checkpoint, for a batch system. A number sets `hours`."""

    short_option: ClassVar[str | None] = "hours"
    hours: float = Field(
        gt=0,
        description="Hours since the run started or was resumed. The run ends after the episode that is followed by "
        "too little time for another one as long as the longest so far.",
    )
    reserve_minutes: float | None = Field(
        None,
        ge=0,
        description="Minutes kept for the last checkpoint and the model. null: twice the longest time that a "
        "checkpoint has taken.",
    )

    def check(self, run: ResolvedRun) -> Iterator[Problem]:
        if TIME_LIMIT in (name.lower().replace("_", "-") for name in run.run.hooks.disable):
            yield Problem("", f"has no effect, because hooks.disable turns off {TIME_LIMIT}", "remove one of them")


max_hours = Component(summary="Ends a run with a checkpoint before a time limit.", config=MaxHoursConfig)
