"""Progress of learning-rate schedules in checkpoints, and factors that change their rates during a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler

    from ..strategy import Trained

_FILE = "scheduler.json"


def save_scheduler(scheduler: LRScheduler, path: Path) -> None:
    """Write a schedule's progress into the folder `path`."""
    path.mkdir(parents=True, exist_ok=True)
    state = scheduler.state_dict()
    kept = {key: state[key] for key in ("last_epoch", "_step_count", "_last_lr") if key in state}
    (path / _FILE).write_text(json.dumps(kept))


def load_scheduler(scheduler: LRScheduler, path: Path) -> None:
    """Restore a schedule's progress."""
    scheduler.load_state_dict({**scheduler.state_dict(), **json.loads((path / _FILE).read_text())})


class LearningRates:
    """Scales the schedules of all trained models. The factors must be saved in checkpoints."""

    def __init__(self, trained: Mapping[str, Trained]) -> None:
        """Construct it before any factor is set or checkpoint loaded, while rates are those of the run file."""
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
            groups = self._trained[role].optimizer.param_groups
            for group, base, shape in zip(groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
                group["initial_lr"], group["lr"] = base, base * shape(schedule.last_epoch)
            self.factors[role] = factor

    def multiply(self, factor: float) -> None:
        """Scale all roles' rates by `factor`, on top of their current factors."""
        self.set({role: known * factor for role, known in self.factors.items()})


def _schedule(trained: Trained) -> Any:
    """Its LambdaLR, untyped: torch's base class does not declare the attributes read here."""
    return trained.scheduler
