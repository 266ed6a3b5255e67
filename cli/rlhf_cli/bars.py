"""Live bars for a terminal: episodes, and the current episode's rollouts and updates."""

from __future__ import annotations

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

from rlhf_core.hookspecs import FitInfo

_REFRESH_PER_SECOND = 4


def make_bars(stream: TextIO, info: FitInfo) -> tuple[Progress, dict[str, TaskID]]:
    """Create the bars of a fit without starting them. Return them and their tasks by name."""
    bars = Progress(
        TextColumn("{task.description:<8}"),
        BarColumn(bar_width=28),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[values]}", style="cyan"),
        console=Console(file=stream),
        refresh_per_second=_REFRESH_PER_SECOND,
    )
    totals = {"episode": info.num_episodes, "rollout": info.samples_per_episode, "update": info.updates_per_episode}
    tasks = {name: bars.add_task(name, total=total, values="") for name, total in totals.items()}
    bars.advance(tasks["episode"], info.first_episode)
    bars.update(tasks["rollout"], visible=bool(info.samples_per_episode))
    return bars, tasks
