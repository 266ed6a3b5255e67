"""`rlhf report`: the report of a run, written again, or of several runs side by side."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("report")
@click.argument(
    "run_dirs",
    metavar="RUN_DIR...",
    nargs=-1,
    required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
)
def report(run_dirs: tuple[Path, ...]) -> None:
    """Write report.html and its plots into each run folder.

    \b
    Examples:
      rlhf report runs/first
      rlhf report runs/*
    """
    from rlhf_core.report import write_report

    for run_dir in run_dirs:
        click.echo(write_report(run_dir))
