"""The hook plugin `time-limit`: ends a run before `train.max_hours`, and records why a run was stopped."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_core.components import Component, HookContext
from rlhf_core.config import Section
from rlhf_core.errors import InterruptedRun
from rlhf_core.hookspecs import Action, FitInfo, Moment, hookimpl
from rlhf_core.runfolder import RunFolder

from .config import MaxHoursConfig

KEY = "train.max_hours"
"""The option that sets the limit, and `by` of the decision."""
_DECISION = "decision"
"""Kind of the manifest's events that record decisions of hook plugins."""
_COPIED_LAST = "state.json"
"""File of a checkpoint that is written while training waits, after all copies were made."""
_SIGNALS = "Ctrl-C, SIGTERM, SIGHUP or SIGUSR1"
_SPREAD = 1.1
"""Assumed maximum length of the next episode, relative to the longest so far."""


class TimeLimit:
    """Ends a run after an episode if the next one would pass the limit. An object belongs to one session of a run.

    In a run over Ray, trainer 0 decides, and the driver records the reason.
    """

    def __init__(self, config: Section, context: HookContext) -> None:
        options = context.run.get("train", {}).get("max_hours")
        self._is_background = bool(context.run.get("checkpoint", {}).get("background"))
        self._options = None if options is None else MaxHoursConfig.model_validate(options)
        self._folder = RunFolder(context.run_folder)
        self._num_decisions = 0
        """Number of decisions in the manifest before this session."""
        self._started = 0.0
        self._last_episode = -1
        self._episode_started = 0.0
        self._episode_ended = 0.0
        self._longest_episode = 0.0
        self._longest_save = 0.0
        """Maximum time in seconds between the end of an episode and that of its checkpoint."""
        self._longest_write = 0.0
        """Maximum time in seconds for which a checkpoint was written after that (`checkpoint.background`)."""
        self._is_over = False

    @hookimpl
    def rlhf_run_start(self) -> None:
        self._num_decisions = len(self._folder.events(_DECISION))

    @hookimpl
    def rlhf_fit_start(self, info: FitInfo) -> None:
        self._last_episode = info.num_episodes - 1
        self._started = self._folder.lock.stat().st_mtime  # written by the process that owns the run as it starts

    @hookimpl
    def rlhf_episode_start(self) -> None:
        self._episode_started = time.monotonic()

    @hookimpl
    def rlhf_decide(self, moment: Moment) -> Action | None:
        if moment.at == "episode":
            self._episode_ended = time.monotonic()
            self._longest_episode = max(self._longest_episode, self._episode_ended - self._episode_started)
            if self._is_background:
                self._longest_write = max(self._longest_write, self._write_seconds())
        if self._options is None or self._is_over or moment.at not in ("episode", "paused"):
            return None
        used = time.time() - self._started
        needed = self._longest_episode * _SPREAD + self._reserve(self._options)
        if used + needed <= self._options.hours * 3600 or moment.episode == self._last_episode:
            return None
        self._is_over = True
        reason = f"{_hours(used)} of {self._options.hours:.3g} hours are over, and another episode may take "
        return Action(kind="interrupt", by=KEY, reason=f"{reason}{_hours(needed)} hours with its checkpoint")

    @hookimpl
    def rlhf_episode_end(self, error: BaseException | None) -> None:
        if error is None:
            self._longest_save = max(self._longest_save, time.monotonic() - self._episode_ended)

    @hookimpl
    def rlhf_run_end(self, run_folder: Path, summary: Mapping[str, Any] | None, error: BaseException | None) -> None:
        """Add `stopped` to `summary.json` of a run that was stopped: which plugin or signal, and why."""
        if summary is None or not isinstance(error, InterruptedRun):
            return
        decisions = self._folder.events(_DECISION)[self._num_decisions :]
        interrupts = [each for each in decisions if each.get("action") == "interrupt"]
        last = interrupts[-1] if interrupts else {"by": "signal", "reason": _SIGNALS}
        self._folder.write_summary({**summary, "stopped": {key: last[key] for key in ("by", "reason")}})

    def _reserve(self, options: MaxHoursConfig) -> float:
        """Return the seconds to keep for the last checkpoint and the model."""
        if options.reserve_minutes is not None:
            return options.reserve_minutes * 60
        return 2 * (self._longest_save + self._longest_write)

    def _write_seconds(self) -> float:
        """Return the seconds from the copy of this session's newest checkpoint to its completion. 0 without one."""
        files = self._folder.checkpoints.glob(f"step-*/{_COPIED_LAST}")
        try:
            copied, completed = max((each.stat().st_mtime, each.parent.stat().st_ctime) for each in files)
        except (ValueError, OSError):  # there is none, or it was removed meanwhile
            return 0.0
        return completed - copied if copied >= self._started else 0.0  # renamed when it was complete


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.3g}"


time_limit = Component(
    summary="Ends a run with a checkpoint before `train.max_hours`.",
    config=Section,
    build="rlhf_guards.time_limit:TimeLimit",
    always_on=True,
)
