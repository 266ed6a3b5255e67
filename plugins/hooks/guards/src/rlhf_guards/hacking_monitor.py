"""The hook plugin `hacking-monitor`: notices that watched values get worse while the trained reward is higher.

Every quarter of a window, a key is tested for a trend and compared with the start. The significance level of each test
is divided by the number of tests of the run.
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

from .trends import higher_p_value, lower_p_value, trend_p_value

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
        20,
        ge=10,
        description="Number of measured episodes over which a key is tested for a trend, every window / 4. The last "
        "half is compared with the first quarter.",
    )
    p_value: float = Field(
        0.01,
        gt=0,
        lt=0.5,
        description="Maximum probability that a run in which no key gets worse is reported, over all of its tests.",
    )
    action: Literal["report", "pause", "finish"] = Field(
        "report", description="Only log it, pause the run until `rlhf control resume`, or end it as done."
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
    """Return the maximum number of tests of a run, two for each key and time.

    Args:
        config: Options of the monitor.
        episodes: Episodes of the run.
    """
    of_key = max(0, (episodes - config.window) // _step(config) + 1)
    return 2 * of_key * len({*config.falls, *config.rises})


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
        first, last = ([(int(row[0]), float(row[1]), float(row[2])) for row in state[key]] for key in ("first", "last"))
        self.first: list[tuple[int, float, float]] = first
        """Episode, trained reward, and watched value (negated if it should not rise) of the first window / 2."""
        self.last: deque[tuple[int, float, float]] = deque(last, maxlen=window)
        """The same for the last window."""

    def add(self, episode: int, trained: float, watched: float) -> None:
        """Add a measurement. Those of this episode and later ones, before a rollback, are dropped."""
        assert self.last.maxlen is not None
        while self.last and self.last[-1][0] >= episode:
            self.last.pop()
            self.number -= 1
        self.first = [row for row in self.first if row[0] < episode]
        if len(self.first) < self.last.maxlen // 2:
            self.first.append((episode, trained, watched))
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
        found: dict[str, tuple[float, str]] = {}
        for key, sign in [*((key, 1.0) for key in self._config.falls), *((key, -1.0) for key in self._config.rises)]:
            if (value := moment.metrics.get(key)) is None:
                continue  # an evaluation is not measured in every episode
            series = self._series.setdefault(key, _Series(self._config.window))
            series.add(moment.episode, trained, sign * value)
            if (tested := self._tested(series)) is None:
                continue
            if tested[0] < self._level:
                found[key] = tested
            else:
                self._reported.discard(key)
        new = sorted(found.keys() - self._reported, key=lambda key: found[key])
        self._reported |= found.keys()
        return self._act(new, found, moment) if new else None

    def _tested(self, series: _Series) -> tuple[float, str] | None:
        """Return the smaller p-value of a trend and of a worse level, and which one it is. None between two tests."""
        config = self._config
        if len(series.last) < config.window or (series.number - config.window) % _step(config):
            return None
        half = config.window // 2
        recent = list(series.last)[-half:]
        if higher_p_value([row[1] for row in series.first], [row[1] for row in recent]) >= config.p_value:
            return 1.0, ""
        trend = trend_p_value([-row[2] for row in series.last])
        # The start is short, since a hack may be found within a few episodes.
        lower = lower_p_value([row[2] for row in series.first[: max(3, _step(config))]], [row[2] for row in recent])
        return min((trend, f"a trend over {config.window} measurements"), (lower, "compared with the start"))

    def _act(self, keys: Sequence[str], found: Mapping[str, tuple[float, str]], moment: Moment) -> Action | None:
        config = self._config
        worse = " and ".join(
            f"{key} {'falls' if key in config.falls else 'rises'} "
            f"(p = {min(1.0, found[key][0] * self._num_tests):.2g}, {found[key][1]})"
            for key in keys
        )
        reason = (
            f"{config.trained} is higher than at the start, and {worse}, corrected for {self._num_tests} tests: "
            "the policy may exploit the reward"
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
