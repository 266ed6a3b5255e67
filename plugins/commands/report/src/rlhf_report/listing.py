"""Lists runs: status, progress, scores, age and size of each."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core.runfolder import RunFolder
from rlhf_pages import RunFacts, find_runs, read_run_config, read_run_facts

from .numbers import number

_HEADINGS = ("name", "status", "algorithm", "episodes", "held-out", "reward", "changed", "size")
_AGES = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))
_SIZES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedRun:
    """A run of the list."""

    name: str
    path: Path
    facts: RunFacts
    num_episodes: int | None
    """Episodes of the whole run, None if unknown."""
    size_bytes: int
    """Size of all files, links not followed."""

    @property
    def num_finished(self) -> int:
        """Episodes that the run has finished or is in."""
        episode = self.facts.last.get("episode")
        return episode + 1 if isinstance(episode, int) else 0

    def to_json(self) -> dict[str, Any]:
        """Return the run as JSON values."""
        facts = self.facts
        return {
            "name": self.name,
            "path": str(self.path),
            "status": facts.status,
            "algorithm": facts.algorithm,
            "model": facts.model,
            "episode": self.num_finished,
            "episodes": self.num_episodes,
            "eval_before": facts.eval_before,
            "eval_after": facts.eval_after,
            "reward": facts.last.get("reward/mean"),
            "wall_s": facts.wall_s,
            "changed": facts.changed,
            "size_bytes": self.size_bytes,
        }


def find_listed_runs(root: Path) -> list[ListedRun]:
    """Return the runs at or below a folder, the most recently changed first."""
    found = [listed_run(name, folder) for name, folder in find_runs(root)]
    return sorted(found, key=lambda each: each.facts.changed, reverse=True)


def listed_run(name: str, folder: RunFolder) -> ListedRun:
    """Read a run for the list."""
    config = read_run_config(folder)
    train = config.get("train")
    episodes = train.get("episodes") if isinstance(train, Mapping) else None
    return ListedRun(
        name=name,
        path=folder.path,
        facts=read_run_facts(folder, config),
        num_episodes=episodes if isinstance(episodes, int) else None,
        size_bytes=sum(_sizes(folder.path)),
    )


def table(runs: Sequence[ListedRun]) -> Iterator[str]:
    """Yield the lines of a table of runs, with columns two spaces apart."""
    now = time.time()
    rows = [tuple(heading.upper() for heading in _HEADINGS), *(_row(run, now) for run in runs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _row(run: ListedRun, now: float) -> tuple[str, ...]:
    facts = run.facts
    before, after = number(facts.eval_before), number(facts.eval_after)
    return (
        run.name,
        facts.status,
        facts.algorithm or "",
        str(run.num_finished) if run.num_episodes is None else f"{run.num_finished}/{run.num_episodes}",
        before or "" if after is None else f"{before or '?'} -> {after}",
        number(facts.last.get("reward/mean")) or "",
        f"{age_text(now - facts.changed)} ago" if facts.changed else "",
        size_text(run.size_bytes),
    )


def age_text(seconds: float) -> str:
    """Format a duration in its largest unit.

    Example:
        >>> age_text(5), age_text(7_300), age_text(200_000)
        ('5 s', '2 h', '2 d')
    """
    length, unit = next(((each, name) for each, name in _AGES if seconds >= each), _AGES[-1])
    return f"{max(0, int(seconds // length))} {unit}"


def size_text(num_bytes: int) -> str:
    """Format a size in decimal units.

    Example:
        >>> size_text(512), size_text(2_340_000), size_text(15_000_000_000)
        ('512 B', '2.3 MB', '15 GB')
    """
    unit = next((each for each in _SIZES if num_bytes >= each[0]), None)
    if unit is None:
        return f"{num_bytes} B"
    value = num_bytes / unit[0]
    return f"{value:.1f} {unit[1]}" if value < 10 else f"{value:.0f} {unit[1]}"


def _sizes(path: Path) -> Iterator[int]:
    """Yield the size of each file below a folder. Folders that cannot be read count as empty."""
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                yield os.lstat(os.path.join(folder, name)).st_size
            except OSError:
                continue  # a running run replaces files
