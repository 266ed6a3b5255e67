"""`report.html`: one self-contained page about one run, or several beside each other, and its plots as PNG files.

The page makes no network requests, runs only its own script (by its hash) and escapes all text of the runs.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from ..errors import UserInputError
from ..util.atomic import write_bytes
from .data import Run, read_run
from .known import known_line, known_sample, known_values
from .page import asset, render

__all__ = ["build_report", "known_line", "known_sample", "known_values", "sample_card_script"]

logger = logging.getLogger("rlhf.report")

NO_PLOTS = "Plots need matplotlib: pip install 'rlhf-core[report]', then: rlhf report RUN_DIR"


def build_report(run_folders: Sequence[Path], output: Path | None = None) -> Path:
    """Write the page, and a `plot-<name>.png` for each plot beside it. Returns the page's path.

    `output` defaults to `report.html` in the (first) run folder. Parts whose keys or files are missing are left out;
    without matplotlib the page has a note in place of plots.

    Raises:
        UserInputError: no folder, or one that holds no run.
        DataError: a file of a run is broken; names it.
    """
    if not run_folders:
        raise UserInputError("no run folder given", where="report", hint="rlhf report RUN_DIR...")
    runs = _named([read_run(path) for path in run_folders])
    page = output or Path(run_folders[0]) / "report.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    plots: dict[str, bytes] = {}
    note = None
    if find_spec("matplotlib") is None:
        note = NO_PLOTS
        logger.warning(NO_PLOTS)
    else:
        from .plots import draw

        plots = draw(runs)
    for name, png in plots.items():
        write_bytes(page.parent / f"plot-{name}.png", png)
    write_bytes(page, render(runs, plots, note=note).encode("utf-8", "replace"))
    return page


def sample_card_script() -> str:
    """The report's script that makes an element of a sample, for pages of plugins: `SampleCard.make(sample)`."""
    return asset("sample_card.js")


def _named(runs: Sequence[Run]) -> list[Run]:
    """Give runs whose folders share a name unique names, by adding their parents' names."""
    names = [run.name for run in runs]
    return [
        replace(run, name=f"{run.path.parent.name}/{run.name}") if names.count(run.name) > 1 else run for run in runs
    ]
