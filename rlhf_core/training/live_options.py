"""Options that hook plugins and users change during a run: learning rates and the algorithm's KL coefficient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..algorithm import Algorithm
from ..config.sections import OptimizerConfig
from ..errors import UserInputError
from ..strategy import Trained


class LiveOptions:
    """Sets them on this rank, and tracks differences from the run file, for checkpoints."""

    def __init__(self, config: OptimizerConfig, trained: Mapping[str, Trained], algorithm: Algorithm[Any, Any]) -> None:
        """Construct it before a checkpoint is loaded, while rates are those of the run file."""
        self._config = config
        self._trained = trained
        self._algorithm = algorithm
        self._peaks = {role: list(_schedule(each).base_lrs) for role, each in trained.items() if each.scheduler}
        self.lr_factors: dict[str, float] = dict.fromkeys(self._peaks, 1.0)
        """Role -> factor on the rates of the run file."""
        self.settings: dict[str, float] = {}
        """Option of the algorithm -> the value it was set to."""
        self.setters = {
            "optimizer.lr": self._set_lr,
            "optimizer.critic_lr": self._set_critic_lr,
            "algorithm.kl_coef": self._set_kl_coef,
        }
        """As `Decisions` takes them."""

    def restore(self, lr_factors: Mapping[str, float], settings: Mapping[str, float]) -> None:
        """Restore all options, including the schedules' rates for the next update."""
        self._set_factors(lr_factors)
        for name, value in settings.items():
            self._algorithm.set_option(name, value)
        self.settings = dict(settings)

    def slow_down(self, factor: float) -> None:
        """Multiply every learning rate."""
        self._set_factors({role: known * factor for role, known in self.lr_factors.items()})

    def describe(self) -> str:
        """Text on the differences from the run file; empty if there are none."""
        parts = [f"learning rate of the {role} x {factor:g}" for role, factor in self.lr_factors.items() if factor != 1]
        return ", ".join(parts + [f"{name} {value:g}" for name, value in self.settings.items()])

    def _set_lr(self, value: float) -> str:
        follows = ["critic"] if self._config.critic_lr is None else []
        return self._set_peak(["policy", *follows], self._config.lr, value, "optimizer.lr")

    def _set_critic_lr(self, value: float) -> str:
        if "critic" not in self.lr_factors:
            raise UserInputError("this run trains no critic", where="optimizer.critic_lr")
        peak = self._config.lr if self._config.critic_lr is None else self._config.critic_lr
        return self._set_peak(["critic"], peak, value, "optimizer.critic_lr")

    def _set_peak(self, roles: list[str], peak: float, value: float, name: str) -> str:
        if peak == 0:
            raise UserInputError(f"{name} is 0 in the run file, and cannot be raised from there", where=name)
        changed = {role: value / peak for role in roles if role in self.lr_factors}
        self._set_factors({**self.lr_factors, **changed})
        return f"{name} is {value:g} from the next update on; the schedule goes on from there"

    def _set_factors(self, factors: Mapping[str, float]) -> None:
        """Use `factors` (a role that is not named has 1) from the next update on."""
        for role, peaks in self._peaks.items():
            factor = float(factors.get(role, 1.0))
            schedule = _schedule(self._trained[role])
            schedule.base_lrs = [peak * factor for peak in peaks]
            groups = self._trained[role].optimizer.param_groups
            for group, base, shape in zip(groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
                group["initial_lr"], group["lr"] = base, base * shape(schedule.last_epoch)
            self.lr_factors[role] = factor

    def _set_kl_coef(self, value: float) -> str:
        self._algorithm.set_option("kl_coef", value)
        self.settings["kl_coef"] = value
        return f"algorithm.kl_coef is {value:g} from the next episode on"


def _schedule(trained: Trained) -> Any:
    """Its LambdaLR, untyped: torch's base class does not declare the attributes read here."""
    return trained.scheduler
