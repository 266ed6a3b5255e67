"""The hook that decides when the run is done."""

from collections.abc import Mapping
from typing import Any

from rlhf_core import hookimpl
from rlhf_core.components import HookContext
from rlhf_core.hookspecs import Action, Moment

from .config import NoveltyGoalConfig


class NoveltyGoal:
    """Finishes the run after `patience` episodes in a row whose answers are as new as the goal."""

    def __init__(self, config: NoveltyGoalConfig, context: HookContext) -> None:
        self.config = config
        self.reached = 0

    @hookimpl
    def rlhf_decide(self, moment: Moment) -> Action | None:
        """Called on rank 0 of the trainer. All processes apply the returned action."""
        novelty = moment.metrics.get("novelty/mean")
        if moment.at != "episode" or novelty is None:
            return None
        self.reached = self.reached + 1 if novelty >= self.config.goal else 0
        if self.reached < self.config.patience:
            return None
        reason = f"novelty/mean is {novelty:.3g}, the goal is {self.config.goal:g}"
        return Action(kind="finish", by="novelty-goal", reason=reason)

    def state_dict(self) -> dict[str, Any]:
        """Saved in checkpoints."""
        return {"reached": self.reached}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.reached = state["reached"]
