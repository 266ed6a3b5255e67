"""`report.html`: one self-contained page about one run or several runs, and its plots as PNG files.

The page does not make network requests, runs only its own script (by its hash) and escapes all text of the runs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rlhf_core.errors import UserInputError

from .data import Run, read_run
from .page import render
from .plots import draw

__all__ = ["build_report"]


def build_report(run_folders: Sequence[Path], output: Path | None = None) -> Path:
    """Write the page, and a file `plot-<name>.png` for each plot next to it.

    Parts whose metrics or files are missing are omitted.

    Args:
        run_folders: folders of the runs.
        output: path of the page. None is `report.html` in the first run folder.

    Returns:
        Path of the page.

    Raises:
        UserInputError: if `run_folders` is empty, or one of the folders is not a run folder.
        DataError: if a file of a run is damaged. The message names the file.
    """
    if not run_folders:
        raise UserInputError("no run folder was passed", where="report", hint="rlhf report RUN_DIR...")
    runs = _with_unique_names([read_run(path) for path in run_folders])
    page = output or Path(run_folders[0]) / "report.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    plots = draw(runs)
    for name, png in plots.items():
        _replace(page.parent / f"plot-{name}.png", png)
    _replace(page, render(runs, plots).encode("utf-8", "replace"))
    return page


def _replace(path: Path, content: bytes) -> None:
    """Write a file atomically. A link at this path is replaced, not followed."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    partial.unlink(missing_ok=True)
    try:
        with partial.open("xb") as file:
            file.write(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _with_unique_names(runs: Sequence[Run]) -> list[Run]:
    """Add the parent's name to the names of runs whose folders share a name."""
    names = [run.name for run in runs]
    return [
        replace(run, name=f"{run.path.parent.name}/{run.name}") if names.count(run.name) > 1 else run for run in runs
    ]
