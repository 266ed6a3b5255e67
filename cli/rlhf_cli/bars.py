"""Live bars for a terminal: episodes, and the current episode's rollouts and updates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from rlhf_core.hookspecs import FitInfo

_REFRESH_PER_SECOND = 4


class Bars:
    """Bars while a fit runs."""

    def __init__(self, stream: TextIO, info: FitInfo) -> None:
        self._bars = Progress(
            TextColumn("{task.description:<8}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[values]}", style="cyan"),
            console=Console(file=stream),
            refresh_per_second=_REFRESH_PER_SECOND,
        )
        totals = {
            "episode": info.num_episodes,
            "rollout": info.samples_per_episode,
            "update": info.updates_per_episode,
        }
        self._tasks = {name: self._bars.add_task(name, total=total, values="") for name, total in totals.items()}
        self._bars.advance(self._tasks["episode"], info.first_episode)
        self._bars.update(self._tasks["rollout"], visible=bool(info.samples_per_episode))
        self._bars.start()

    def begin_episode(self) -> None:
        """Empty the bars of an episode's parts."""
        for part in ("rollout", "update"):
            self._bars.reset(self._tasks[part])

    def advance(self, name: str, amount: int, values: Sequence[str] = ()) -> None:
        """Fill a bar by so much; values are shown beside it."""
        self._bars.update(self._tasks[name], advance=amount, values="  ".join(values))

    def say(self, line: str) -> None:
        """Print a line above the bars."""
        self._bars.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def stop(self) -> None:
        self._bars.stop()
