"""The hook plugin `hacking-monitor`: notices that the trained reward rises while watched values get worse."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, model_validator

from rlhf_core.components import Component, HookContext
from rlhf_core.config import Section
from rlhf_core.hookspecs import Action, Moment, hookimpl

logger = logging.getLogger("rlhf")

NAME = "hacking-monitor"


class MonitorConfig(Section):
    """Options of `hooks: {hacking-monitor: …}`."""

    trained: str = Field("reward/mean", min_length=1, description="Key of the trained reward in `metrics.jsonl`.")
    falls: list[str] = Field(
        default_factory=lambda: ["eval/score"],
        description="Keys that should not fall: held-out scores, rewards of weight 0, a judge.",
    )
    rises: list[str] = Field(
        default_factory=list, description="Keys that should not rise, such as response/length_mean."
    )
    window: int = Field(20, ge=5, description="Number of measured episodes over which trends are compared.")
    p_value: float = Field(0.001, gt=0, lt=0.5, description="Report trends whose p-value is below this.")
    action: Literal["report", "pause", "finish"] = Field(
        "report", description="Only log the trend, pause the run until `rlhf control resume`, or end it as done."
    )

    @model_validator(mode="after")
    def _watches(self) -> MonitorConfig:
        if not self.falls and not self.rises:
            raise ValueError("needs a key in `falls` or `rises`")
        return self


class HackingMonitor:
    """Compares the trend of the trained reward with those of watched keys, over the last measured episodes."""

    def __init__(self, config: MonitorConfig, context: HookContext) -> None:
        self._config = config
        self._series: dict[str, deque[tuple[float, float]]] = {}
        """Watched key -> pairs of the trained reward and the watched value, negated if it should not rise."""
        self._reported: set[str] = set()

    @hookimpl
    def rlhf_decide(self, moment: Moment) -> Action | None:
        if moment.at != "episode" or (trained := moment.metrics.get(self._config.trained)) is None:
            return None
        found = {}
        for key, sign in [*((key, 1.0) for key in self._config.falls), *((key, -1.0) for key in self._config.rises)]:
            if (value := moment.metrics.get(key)) is None:
                continue  # an evaluation is not measured in every episode
            series = self._series.setdefault(key, deque(maxlen=self._config.window))
            series.append((trained, sign * value))
            p = parting_p_value(series) if len(series) == self._config.window else 1.0
            if p < self._config.p_value:
                found[key] = p
            else:
                self._reported.discard(key)
        new = sorted(found.keys() - self._reported, key=lambda key: found[key])
        self._reported |= found.keys()
        return self._act(new[0], found[new[0]], moment) if new else None

    def _act(self, key: str, p: float, moment: Moment) -> Action | None:
        config = self._config
        direction = "falls" if key in config.falls else "rises"
        reason = (
            f"{config.trained} rises and {key} {direction} over the last {config.window} measurements "
            f"(p = {p:.2g}): the policy may exploit the reward"
        )
        hint = "read the newest lines of samples.jsonl, and compare the rewards of a few answers by hand"
        logger.warning("hooks.%s: episode %d: %s\n  -> %s", NAME, moment.episode, reason, hint)
        return None if config.action == "report" else Action(kind=config.action, by=NAME, reason=reason, hint=hint)

    def state_dict(self) -> dict[str, Any]:
        series = {key: [list(pair) for pair in pairs] for key, pairs in self._series.items()}
        return {"series": series, "reported": sorted(self._reported)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        window = self._config.window
        self._series = {
            key: deque(((float(one), float(other)) for one, other in pairs), maxlen=window)
            for key, pairs in state["series"].items()
        }
        self._reported = set(state["reported"])


def parting_p_value(pairs: Sequence[tuple[float, float]] | deque[tuple[float, float]]) -> float:
    """Return the p-value of "the first value rises and the second one falls", the larger one of both trends' p-values.

    Args:
        pairs: Values in order of time.

    Returns:
        A probability, 1 without a trend.

    Example:
        >>> parting_p_value([(step, -step) for step in range(20)]) < 1e-6
        True
        >>> parting_p_value([(step, step) for step in range(20)]) > 0.99
        True
    """
    first, second = zip(*pairs, strict=True)
    return max(trend_p_value(first), trend_p_value([-value for value in second]))


def trend_p_value(values: Sequence[float]) -> float:
    """Return the one-sided p-value of a rising trend (Mann 1945, Kendall 1975), by the normal approximation.

    Args:
        values: Values in order of time.

    Returns:
        A probability, 1 if all values are equal.
    """
    number = len(values)
    score = sum((later > earlier) - (later < earlier) for i, earlier in enumerate(values) for later in values[i + 1 :])
    ties = [values.count(value) for value in set(values)]
    variance = (number * (number - 1) * (2 * number + 5) - sum(t * (t - 1) * (2 * t + 5) for t in ties)) / 18
    if variance <= 0:
        return 1.0
    z = (score - (score > 0) + (score < 0)) / math.sqrt(variance)
    return 0.5 * math.erfc(z / math.sqrt(2))


hacking_monitor = Component(
    summary="Reports that the trained reward rises while held-out scores or other watched values get worse.",
    config=MonitorConfig,
    build="rlhf_guards.hacking_monitor:HackingMonitor",
)
