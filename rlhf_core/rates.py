"""Learning rates that change while a run trains: a factor per role on what the run file says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .strategy import Trained


class LearningRates:
    """Scales the schedules of all trained models. The factors belong into checkpoints."""

    def __init__(self, trained: Mapping[str, Trained]) -> None:
        """To be made before any factor is set or checkpoint loaded: the rates are then those of the run file."""
        self._trained = trained
        self._peaks = {role: list(_schedule(each).base_lrs) for role, each in trained.items() if each.scheduler}
        self.factors: dict[str, float] = dict.fromkeys(self._peaks, 1.0)
        """Role -> factor on its rates."""

    def set(self, factors: Mapping[str, float]) -> None:
        """Use `factors` (a role that is not named has 1) from the next update on."""
        for role, peaks in self._peaks.items():
            factor = float(factors.get(role, 1.0))
            schedule = _schedule(self._trained[role])
            schedule.base_lrs = [peak * factor for peak in peaks]
            rates = [
                base * shape(schedule.last_epoch)
                for base, shape in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
            ]
            for group, base, rate in zip(
                self._trained[role].optimizer.param_groups, schedule.base_lrs, rates, strict=True
            ):
                group["initial_lr"] = base
                group["lr"] = rate
            self.factors[role] = factor

    def multiply(self, factor: float) -> None:
        """Scale all roles' rates by `factor`, on top of the factors they have."""
        self.set({role: known * factor for role, known in self.factors.items()})


def _schedule(trained: Trained) -> Any:
    """The LambdaLR that `schedule.make_scheduler` made; torch's base class declares none of what is read here."""
    return trained.scheduler
