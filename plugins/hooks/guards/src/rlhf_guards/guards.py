"""The hook plugin `guards`: watches the updates of a run, with the options of the section `guards`."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from rlhf_core.components import Component, HookContext
from rlhf_core.hookspecs import Action, Moment, hookimpl
from rlhf_core.runfolder import RunFolder
from rlhf_core.util import read_lines

from .checks import Plateau, check_bound, check_finite
from .config import GuardsConfig

logger = logging.getLogger("rlhf")

_BOUNDS = {"kl": ("kl/mean", 1), "entropy": ("policy/entropy", -1), "log_prob_gap": ("rollout/logprob_gap_max", 1)}
"""Metric of each guard, and 1 if the bound is a maximum, -1 if it is a minimum."""
_HINTS = {
    "non_finite": "lower optimizer.lr",
    "kl": "lower optimizer.lr, or raise the algorithm's KL penalty",
    "entropy": "lower optimizer.lr, or sample at a higher engine.temperature",
    "log_prob_gap": "compare strategy.precision with the precision of the engine",
}
"""Hint of each guard if it ends a run."""


class Guards:
    """The guards of a run."""

    def __init__(self, config: GuardsConfig, folder: RunFolder) -> None:
        self._config = config
        self._folder = folder
        self._plateau = Plateau(config.plateau)
        self._warned: set[tuple[str, int]] = set()
        self.may_roll_back = bool(config.rolling_back)
        """Whether the run needs a checkpoint before its first update."""

    @hookimpl
    def rlhf_fit_start(self) -> None:
        self._plateau.restart(read_lines(self._folder.metrics))

    @hookimpl
    def rlhf_decide(self, moment: Moment) -> list[Action]:
        if moment.at not in ("update", "failed-update"):
            return []
        problems = (
            (name, options, self._problem(name, options, moment)) for name, options in self._config.enabled.items()
        )
        actions = [self._action(name, options.action, text, moment) for name, options, text in problems if text]
        return [action for action in actions if action is not None]

    def _problem(self, name: str, options: Any, moment: Moment) -> str | None:
        if name in _BOUNDS:
            metric, sign = _BOUNDS[name]
            return check_bound(moment.metrics, metric, options.bound, sign=sign)
        return check_finite(moment) if name == "non_finite" else self._plateau.problem(moment.episode, moment.metrics)

    def _action(self, name: str, kind: Any, problem: str, moment: Moment) -> Action | None:
        """Return the action of a triggered guard, or None for a warning, which is logged once per episode."""
        if kind != "warn":
            rollback = self._config.rollback
            hint = "lower optimizer.lr, or see guards.rollback" if kind == "rollback" else _HINTS.get(name)
            action = Action(kind=kind, by=name, reason=problem, hint=hint)
            return replace(action, lr_factor=rollback.lr_factor, max_times=rollback.max_times)
        if (name, moment.episode) not in self._warned:
            logger.warning("guard %s, update %d (episode %d): %s", name, moment.step, moment.episode + 1, problem)
            self._warned.add((name, moment.episode))
        return None


def build(config: GuardsConfig, context: HookContext) -> Guards:
    """Return the hook plugin of the section `guards`."""
    return Guards(config, RunFolder(context.run_folder))


guards = Component(
    summary="Warns, skips, stops or rolls back if a value of an update crosses its bound.",
    config=GuardsConfig,
    build="rlhf_guards.guards:build",
    always_on=True,
)
