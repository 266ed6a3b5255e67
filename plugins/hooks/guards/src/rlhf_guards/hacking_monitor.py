"""The hook plugin `hacking-monitor`: notices that watched values get worse while the trained reward is higher.

A key is tested every quarter of a window, and the level of each test is divided by the number of tests of the run.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from rlhf_core.components import Component, HookContext
from rlhf_core.config import Problem, Section
from rlhf_core.hookspecs import Action, Moment, hookimpl
from rlhf_core.util import suggestion

from .trends import higher_p_value, trend_p_value

if TYPE_CHECKING:
    from rlhf_core.config import ResolvedRun

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
    window: int = Field(
        20, ge=10, description="Number of measured episodes over which a key is tested for a trend, every window / 4."
    )
    p_value: float = Field(
        0.01,
        gt=0,
        lt=0.5,
        description="Maximum probability that a run in which no key has a trend is reported, over all of its tests.",
    )
    action: Literal["report", "pause", "finish"] = Field(
        "report", description="Only log the trend, pause the run until `rlhf control resume`, or end it as done."
    )

    def check(self, run: ResolvedRun) -> Iterator[Problem]:
        """Yield a problem if no trend could be reported.

        Args:
            run: The resolved run.
        """
        episodes = run.run.train.episodes
        if num_tests(self, episodes) and trend_p_value(range(self.window)) >= level(self, episodes):
            problem = f"no trend over {self.window} measurements is significant in {num_tests(self, episodes)} tests"
            yield Problem("window", problem, f"set window: {2 * self.window}, or raise p_value")

    @model_validator(mode="after")
    def _watches(self) -> MonitorConfig:
        if not self.falls and not self.rises:
            raise ValueError("needs a key in `falls` or `rises`")
        if both := sorted({*self.falls} & {*self.rises}):
            raise ValueError(f"{both[0]} is in `falls` and in `rises`")
        return self


def num_tests(config: MonitorConfig, episodes: int) -> int:
    """Return the maximum number of tests of a run, over all keys.

    Args:
        config: Options of the monitor.
        episodes: Episodes of the run.
    """
    of_key = max(0, (episodes - config.window) // _step(config) + 1)
    return of_key * len({*config.falls, *config.rises})


def level(config: MonitorConfig, episodes: int) -> float:
    """Return the p-value below which one test is reported (Bonferroni: their sum is `config.p_value`).

    Args:
        config: Options of the monitor.
        episodes: Episodes of the run.
    """
    return config.p_value / max(1, num_tests(config, episodes))


def _step(config: MonitorConfig) -> int:
    """Number of measurements between two tests of a key."""
    return config.window // 4


class _Series:
    """Measurements of one watched key."""

    def __init__(self, window: int, state: Mapping[str, Any] | None = None) -> None:
        state = state or {"number": 0, "first": [], "last": []}
        self.number = int(state["number"])
        """Number of measurements so far."""
        self.first: list[tuple[int, float]] = [(int(episode), float(value)) for episode, value in state["first"]]
        """Episode and trained reward of the first window / 2 measurements."""
        rows = ((int(episode), float(trained), float(watched)) for episode, trained, watched in state["last"])
        self.last: deque[tuple[int, float, float]] = deque(rows, maxlen=window)
        """Episode, trained reward, and watched value, negated if it should not rise."""

    def add(self, episode: int, trained: float, watched: float) -> None:
        """Add a measurement. Those of this episode and later ones, before a rollback, are dropped."""
        assert self.last.maxlen is not None
        while self.last and self.last[-1][0] >= episode:
            self.last.pop()
            self.number -= 1
        self.first = [row for row in self.first if row[0] < episode]
        if len(self.first) < self.last.maxlen // 2:
            self.first.append((episode, trained))
        self.last.append((episode, trained, watched))
        self.number += 1

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number, "first": [*map(list, self.first)], "last": [*map(list, self.last)]}


class HackingMonitor:
    """Reports watched keys that get worse while the trained reward is higher than at the start."""

    def __init__(self, config: MonitorConfig, context: HookContext) -> None:
        episodes = int(context.run["train"]["episodes"])
        self._config = config
        self._num_tests = num_tests(config, episodes)
        self._level = level(config, episodes)
        self._series: dict[str, _Series] = {}
        self._reported: set[str] = set()
        self._missing: set[str] | None = {config.trained, *config.falls, *config.rises}
        """Keys to look for in the first episode. None afterwards."""

    @hookimpl
    def rlhf_decide(self, moment: Moment) -> Action | None:
        if moment.at != "episode":
            return None
        self._warn_of_missing(moment)
        if (trained := moment.metrics.get(self._config.trained)) is None:
            return None
        found = {}
        for key, sign in [*((key, 1.0) for key in self._config.falls), *((key, -1.0) for key in self._config.rises)]:
            if (value := moment.metrics.get(key)) is None:
                continue  # an evaluation is not measured in every episode
            series = self._series.setdefault(key, _Series(self._config.window))
            series.add(moment.episode, trained, sign * value)
            if (p := self._tested(series)) is None:
                continue
            if p < self._level:
                found[key] = p
            else:
                self._reported.discard(key)
        new = sorted(found.keys() - self._reported, key=lambda key: found[key])
        self._reported |= found.keys()
        return self._act(new, found, moment) if new else None

    def _tested(self, series: _Series) -> float | None:
        """Return the p-value of a falling key while the reward has risen. None between two tests."""
        config = self._config
        if len(series.last) < config.window or (series.number - config.window) % _step(config):
            return None
        half = config.window // 2
        recent = [trained for _, trained, _ in series.last][-half:]
        if higher_p_value([trained for _, trained in series.first], recent) >= config.p_value:
            return 1.0
        return trend_p_value([-watched for _, _, watched in series.last])

    def _act(self, keys: Sequence[str], found: Mapping[str, float], moment: Moment) -> Action | None:
        config = self._config
        trends = " and ".join(
            f"{key} {'falls' if key in config.falls else 'rises'} (p = {min(1.0, found[key] * self._num_tests):.2g})"
            for key in keys
        )
        reason = (
            f"{config.trained} is higher than at the start, and over the last {config.window} measurements {trends}, "
            f"corrected for {self._num_tests} tests: the policy may exploit the reward"
        )
        hint = "read the newest lines of samples.jsonl, and compare the rewards of a few answers by hand"
        logger.warning("hooks.%s: episode %d: %s\n  -> %s", NAME, moment.episode, reason, hint)
        return None if config.action == "report" else Action(kind=config.action, by=NAME, reason=reason, hint=hint)

    def _warn_of_missing(self, moment: Moment) -> None:
        """Warn once of keys that do not exist. Metrics of an evaluation are not measured in every episode."""
        for key in sorted(self._missing or ()):
            if key not in moment.metrics and not key.startswith("eval/"):
                similar = suggestion(key, moment.metrics)
                logger.warning("hooks.%s: the first episode has no metric %s%s", NAME, key, similar)
        self._missing = None

    def state_dict(self) -> dict[str, Any]:
        series = {key: each.state_dict() for key, each in self._series.items()}
        return {"series": series, "reported": sorted(self._reported)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._series = {key: _Series(self._config.window, each) for key, each in state["series"].items()}
        self._reported = set(state["reported"])


hacking_monitor = Component(
    summary="Reports that the trained reward rises while held-out scores or other watched values get worse.",
    config=MonitorConfig,
    build="rlhf_guards.hacking_monitor:HackingMonitor",
)
