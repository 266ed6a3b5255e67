"""Finds the run folders in a folder, and reads the facts that a list of runs shows.

Run folders are untrusted: links are not followed, values of a wrong type are dropped, and damaged files count as empty.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from rlhf_core.errors import RlhfError
from rlhf_core.runfolder import RunFolder
from rlhf_core.util import redact_mapping

from .known import known_line, known_values
from .new_lines import read_new_lines

MAX_RUNS = 500
_DEPTH = 3
_LINE_BYTES = 64 * 2**10
_SKIPPED = {"checkpoints", "model", "adapter", "tensorboard", "control"}
"""Folders of a run that are not searched for runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Facts about one run. Missing or damaged files leave None."""

    status: str
    """Status of `summary.json`, `killed` for a running one whose process has ended, or `unfinished` without one."""
    algorithm: str | None
    model: str | None
    """The value of `model.path`."""
    eval_before: float | None
    eval_after: float | None
    wall_s: float | None
    """Duration in seconds, None while the run is running."""
    last: Mapping[str, Any]
    """The newest line of `metrics.jsonl`, {} if there is none."""
    changed: float
    """Time of the last change, in seconds since the epoch."""


def find_runs(root: Path) -> Iterator[tuple[str, RunFolder]]:
    """Find the runs at or below a folder, at most `MAX_RUNS`. Links and hidden folders are not searched.

    Args:
        root: the folder, itself possibly a run.

    Yields:
        Name (path relative to `root`) and folder of each run, a run before those that it contains.

    Example:
        >>> list(find_runs(Path("an-empty-folder")))
        []
    """
    found = 0
    for path in _folders(root, _DEPTH):
        try:
            folder = RunFolder.read(path)
        except (RlhfError, OSError):
            continue  # not a run folder, or one with a link or a device in place of a file
        yield (path.relative_to(root).as_posix() if path != root else path.resolve().name), folder
        found += 1
        if found == MAX_RUNS:
            return


def read_run_facts(folder: RunFolder, config: Mapping[str, Any]) -> RunFacts:
    """Read the facts of a run.

    Args:
        folder: the run's folder.
        config: its run file, as `read_run_config` returns it.

    Returns:
        The facts.
    """
    summary = read_run_json(folder, folder.summary)
    lines = read_new_lines(folder.metrics, None, known_line, newest_bytes=_LINE_BYTES).lines
    is_running = summary.get("status") == "running"
    return RunFacts(
        status=_status(summary),
        algorithm=_name(config.get("algorithm")),
        model=_name(config.get("model"), "path"),
        eval_before=_score(summary.get("eval_before")),
        eval_after=_score(summary.get("eval_after")),
        wall_s=None if is_running else _score(summary.get("wall_s")),
        last=dict(lines[-1]) if lines else {},
        changed=max(_changed(path) for path in (folder.metrics, folder.summary, folder.config)),
    )


def read_run_config(folder: RunFolder) -> dict[str, Any]:
    """Read the resolved run file without secrets.

    Args:
        folder: the run's folder.

    Returns:
        The run file, {} if it is missing or damaged.
    """
    try:
        return known_values(redact_mapping(folder.read_config()))
    except (RlhfError, OSError):
        return {}


def read_run_json(folder: RunFolder, path: Path) -> dict[str, Any]:
    """Read a small JSON file of a run.

    Args:
        folder: the run's folder.
        path: a file in it.

    Returns:
        The object, {} if the file is missing, damaged or a link.
    """
    try:
        return {} if path.is_symlink() or not path.is_file() else known_values(folder.read_json(path))
    except (RlhfError, OSError):
        return {}


def _folders(root: Path, depth: int) -> Iterator[Path]:
    yield root
    if depth == 0:
        return
    try:
        entries = sorted(os.scandir(root), key=lambda entry: entry.name, reverse=True)
    except OSError:
        return
    for entry in entries:
        if entry.name not in _SKIPPED and not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False):
            yield from _folders(Path(entry.path), depth - 1)


def _status(summary: Mapping[str, Any]) -> str:
    status = str(summary.get("status", "unfinished"))
    pid = summary.get("pid")
    if status != "running" or summary.get("host") != socket.gethostname() or not isinstance(pid, int):
        return status
    return status if 0 < pid < 2**31 and psutil.pid_exists(pid) else "killed"


def _name(section: Any, key: str = "name") -> str | None:
    value = section.get(key) if isinstance(section, Mapping) else section
    return value if isinstance(value, str) else None


def _score(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
