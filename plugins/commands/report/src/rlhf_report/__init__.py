"""`report.html`: one self-contained page about one run, or several beside each other, and its plots as PNG files.

The page makes no network requests, runs only its own script (by its hash) and escapes all text of the runs.
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
    """Write the page, and a `plot-<name>.png` for each plot beside it. Returns the page's path.

    `output` defaults to `report.html` in the (first) run folder. Parts whose keys or files are missing are left out.

    Raises:
        UserInputError: no folder, or one that holds no run.
        DataError: a file of a run is broken; names it.
    """
    if not run_folders:
        raise UserInputError("no run folder given", where="report", hint="rlhf report RUN_DIR...")
    runs = _named([read_run(path) for path in run_folders])
    page = output or Path(run_folders[0]) / "report.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    plots = draw(runs)
    for name, png in plots.items():
        _replace(page.parent / f"plot-{name}.png", png)
    _replace(page, render(runs, plots).encode("utf-8", "replace"))
    return page


def _replace(path: Path, content: bytes) -> None:
    """Write a file whole or not at all; a link in its place is replaced, not followed."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    beside.unlink(missing_ok=True)
    try:
        with beside.open("xb") as file:
            file.write(content)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _named(runs: Sequence[Run]) -> list[Run]:
    """Give runs whose folders share a name unique names, by adding their parents' names."""
    names = [run.name for run in runs]
    return [
        replace(run, name=f"{run.path.parent.name}/{run.name}") if names.count(run.name) > 1 else run for run in runs
    ]
