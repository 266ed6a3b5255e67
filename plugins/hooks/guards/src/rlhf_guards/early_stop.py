"""The hook plugin `early-stop`: ends a run as done when a metric crosses a bound."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from pydantic import Field, model_validator

from rlhf_core.components import Component, HookContext
from rlhf_core.config import Section
from rlhf_core.hookspecs import Action, Metrics, Moment, hookimpl
from rlhf_core.util import suggestion

logger = logging.getLogger("rlhf")

NAME = "early-stop"


class EarlyStopConfig(Section):
    """Options of `hooks: {early-stop: …}`."""

    metric: str = Field("eval/score", min_length=1, description="Key of `metrics.jsonl` to watch.")
    above: float | None = Field(None, description="The run is done when the metric is above this value.")
    below: float | None = Field(None, description="The run is done when the metric is below this value.")
    patience: int = Field(1, ge=1, description="Number of consecutive measured episodes for which that must hold.")

    @model_validator(mode="after")
    def _has_one_bound(self) -> EarlyStopConfig:
        if (self.above is None) == (self.below is None):
            raise ValueError("needs one of `above` and `below`")
        return self


class EarlyStop:
    """Finishes a run after `patience` consecutive measured episodes whose metric is beyond the bound."""

    def __init__(self, config: EarlyStopConfig, context: HookContext) -> None:
        self._config = config
        self._count = 0
        self._was_seen = False

    @hookimpl
    def rlhf_decide(self, moment: Moment) -> Action | None:
        if moment.at != "episode":
            return None
        config, metrics = self._config, moment.metrics
        value = metrics.get(config.metric)
        if value is None:
            self._warn_of_missing(metrics)
            return None
        self._was_seen = True
        above = config.above is not None and value > config.above
        below = config.below is not None and value < config.below
        self._count = self._count + 1 if above or below else 0
        if self._count < config.patience:
            return None
        bound = f"above {config.above:g}" if above else f"below {config.below:g}"
        times = f" for {self._count} episodes" if config.patience > 1 else ""
        return Action(kind="finish", by=NAME, reason=f"{config.metric} is {value:.4g}, {bound}{times}")

    def state_dict(self) -> dict[str, Any]:
        return {"held": self._count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._count = int(state["held"])

    def _warn_of_missing(self, metrics: Metrics) -> None:
        """Warn once that the metric does not exist. Metrics of an evaluation are not measured in every episode."""
        if self._was_seen or self._config.metric.startswith("eval/"):
            return
        self._was_seen = True
        similar = suggestion(self._config.metric, metrics)
        logger.warning("hooks.%s.metric: this run has no %s%s", NAME, self._config.metric, similar)


early_stop = Component(
    summary="Ends the run as done when a metric is above or below a bound.",
    config=EarlyStopConfig,
    build="rlhf_guards.early_stop:EarlyStop",
)
