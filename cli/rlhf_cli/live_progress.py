"""Live bars for a terminal: episodes, and the current episode's rollouts and updates."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from rlhf_core.hookspecs import FitInfo, Metrics, hookimpl
from rlhf_core.util.redact import printable

from .progress import PlainProgress, shown

_REFRESH_PER_SECOND = 4
_PARTS = ("rollout", "update")


class LiveProgress(PlainProgress):
    """Bars while a fit runs; evaluations and the summary stay on the screen."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._console = Console(file=self._stream)
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    @hookimpl
    def rlhf_fit_start(self, info: FitInfo) -> None:
        super().rlhf_fit_start(info)
        self._bars = Progress(
            TextColumn("{task.description:<8}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[values]}", style="cyan"),
            console=self._console,
            refresh_per_second=_REFRESH_PER_SECOND,
        )
        self._add("episode", info.num_episodes, completed=info.first_episode)
        self._add("rollout", info.samples_per_episode)
        self._add("update", info.updates_per_episode)
        self._bars.start()

    @hookimpl
    def rlhf_episode_start(self) -> None:
        for part in _PARTS:
            if self._bars is not None:
                self._bars.reset(self._tasks[part], visible=part == "update" or bool(self._info.samples_per_episode))

    @hookimpl
    def rlhf_make_experience_end(self, num_samples: int) -> None:
        self._advance("rollout", num_samples)

    @hookimpl
    def rlhf_update_end(self, metrics: Metrics | None) -> None:
        self._advance("update", 1)
        if self._bars is not None and metrics:
            self._bars.update(self._tasks["update"], values="  ".join(shown(metrics)))

    @hookimpl
    def rlhf_episode_end(self, episode: int, metrics: Metrics | None, error: BaseException | None) -> None:
        if error is not None or metrics is None:
            return
        self._remember(metrics)
        if self._bars is not None:
            values = "  ".join(shown({key: value for key, value in metrics.items() if not key.startswith("loss/")}))
            self._bars.update(self._tasks["episode"], completed=episode + 1, values=values)

    @hookimpl
    def rlhf_fit_end(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    @hookimpl
    def rlhf_run_end(self, run_folder: Path, summary: Metrics | None) -> None:
        rows = self.summary_rows(run_folder, summary or {})
        width = max(len(name) for name, _ in rows)
        for name, value in rows:  # no rich table: it would cut or fold a long path, which is to be copied
            self._console.print(Text.assemble((name.ljust(width), "dim"), "  ", printable(value)), soft_wrap=True)

    def say(self, line: str) -> None:
        """Print above the bars."""
        self._console.print(printable(line), highlight=False, markup=False, soft_wrap=True)

    def _add(self, name: str, total: int | None, completed: int = 0) -> None:
        if self._bars is not None:
            self._tasks[name] = self._bars.add_task(name, total=total, completed=completed, values="")

    def _advance(self, name: str, amount: int) -> None:
        if self._bars is not None:
            self._bars.advance(self._tasks[name], amount)
