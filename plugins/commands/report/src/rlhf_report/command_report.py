"""`rlhf report`: writes the report of a run again, or one that compares several runs."""

from __future__ import annotations

from pathlib import Path

import click

from .terminal import echo


@click.command("report")
@click.argument(
    "run_dirs",
    metavar="RUN_DIR...",
    nargs=-1,
    required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
)
@click.option(
    "--output",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The page.  [default: report.html in the run folder, or in the current folder for several runs]",
)
def report(run_dirs: tuple[Path, ...], output: Path | None) -> None:
    """Write an HTML page with plots about one run or several runs.

    \b
    Examples:
      rlhf report runs/first
      rlhf report runs/first runs/second --output comparison.html
    """
    from rlhf_core.errors import UserInputError

    from . import build_report

    if output is None and len(run_dirs) > 1:
        output = Path("report.html")
    try:
        echo(str(build_report(run_dirs, output)))
    except OSError as error:
        path = output or run_dirs[0]
        raise UserInputError(f"cannot be written: {error.strerror or error}", where=str(path)) from error
