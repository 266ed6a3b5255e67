"""Options that hook plugins and users change during a run: learning rates and the algorithm's KL coefficient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..algorithm import Algorithm
from ..config.sections import OptimizerConfig
from ..errors import UserInputError
from ..optimizers.lr_schedule import LearningRates
from ..strategy import Trained


class LiveOptions:
    """Sets them on this rank, and tracks differences from the run file, for checkpoints."""

    def __init__(self, config: OptimizerConfig, trained: Mapping[str, Trained], algorithm: Algorithm[Any, Any]) -> None:
        """Construct it before a checkpoint is loaded."""
        self._config = config
        self._rates = LearningRates(trained)
        self._algorithm = algorithm
        self.settings: dict[str, float] = {}
        """Option of the algorithm -> the value it was set to."""
        self.setters = {
            "optimizer.lr": self._set_lr,
            "optimizer.critic_lr": self._set_critic_lr,
            "algorithm.kl_coef": self._set_kl_coef,
        }
        """As `Decisions` takes them."""

    @property
    def lr_factors(self) -> dict[str, float]:
        """Role -> factor on the rates of the run file."""
        return self._rates.factors

    def restore(self, lr_factors: Mapping[str, float], settings: Mapping[str, float]) -> None:
        """Restore all options, including the schedules' rates for the next update."""
        self._rates.set(lr_factors)
        for name, value in settings.items():
            self._algorithm.set_option(name, value)
        self.settings = dict(settings)

    def slow_down(self, factor: float) -> None:
        """Multiply every learning rate."""
        self._rates.multiply(factor)

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
        self._rates.set({**self.lr_factors, **changed})
        return f"{name} is {value:g} from the next update on; the schedule goes on from there"

    def _set_kl_coef(self, value: float) -> str:
        self._algorithm.set_option("kl_coef", value)
        self.settings["kl_coef"] = value
        return f"algorithm.kl_coef is {value:g} from the next episode on"
