"""Options that hook plugins and users change during a run: learning rates and the algorithm's KL coefficient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..algorithm import Algorithm
from ..config.sections import OptimizerConfig
from ..errors import UserInputError
from ..strategy import TrainedModel


class LiveOptions:
    """Sets these options on this rank, and tracks differences from the run file for checkpoints."""

    def __init__(
        self, config: OptimizerConfig, trained: Mapping[str, TrainedModel], algorithm: Algorithm[Any, Any]
    ) -> None:
        """Read the rates of the run file, so this must happen before a checkpoint is loaded."""
        self._trained = trained
        self._algorithm = algorithm
        self._schedules: dict[str, Any] = {role: each.scheduler for role, each in trained.items() if each.scheduler}
        """LambdaLR of each role, untyped: torch's base class does not declare the attributes read here."""
        self._peaks = {role: list(each.base_lrs) for role, each in self._schedules.items()}
        self._rates = {
            "optimizer.lr": (config.lr, ["policy", "critic"] if config.critic_lr is None else ["policy"]),
            "optimizer.critic_lr": (config.lr if config.critic_lr is None else config.critic_lr, ["critic"]),
        }
        """Option -> its value in the run file, and the roles that use it."""
        self.lr_factors: dict[str, float] = dict.fromkeys(self._peaks, 1.0)
        """Role -> factor on the rates of the run file."""
        self.settings: dict[str, float] = {}
        """Option of the algorithm -> the value it was set to."""

    def set(self, option: str, value: float) -> str:
        """Set an option by its key in the run file, and return a message. Raises `UserInputError` if it is fixed."""
        section, _, name = option.partition(".")
        if section == "algorithm":
            self._algorithm.set_option(name, value)
            self.settings[name] = value
            return f"{option} is {value:g} from the next episode on"
        if option not in self._rates:
            raise UserInputError(f"{option} cannot be set, only algorithm.kl_coef, {', '.join(self._rates)}")
        peak, roles = self._rates[option]
        changed = [role for role in roles if role in self.lr_factors]
        if not changed:
            raise UserInputError(f"this run trains no {roles[0]}", where=option)
        if peak == 0:
            raise UserInputError(f"{option} is 0 in the run file, which a factor cannot change", where=option)
        self._set_factors(self.lr_factors | dict.fromkeys(changed, value / peak))
        return f"{option} is {value:g} from the next update on, and the schedule continues from there"

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
        """Return the differences from the run file as text. Empty without differences."""
        parts = [f"learning rate of the {role} x {factor:g}" for role, factor in self.lr_factors.items() if factor != 1]
        return ", ".join(parts + [f"{name} {value:g}" for name, value in self.settings.items()])

    def _set_factors(self, factors: Mapping[str, float]) -> None:
        """Use `factors` (1 for a role that is missing) from the next update on."""
        for role, peaks in self._peaks.items():
            factor = float(factors.get(role, 1.0))
            schedule = self._schedules[role]
            schedule.base_lrs = [peak * factor for peak in peaks]
            groups = self._trained[role].optimizer.param_groups
            for group, base, shape in zip(groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
                group["initial_lr"], group["lr"] = base, base * shape(schedule.last_epoch)
            self.lr_factors[role] = factor
