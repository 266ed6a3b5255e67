"""`rlhf runs`: lists the runs of a folder, and removes runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from .terminal import echo, print_json

if TYPE_CHECKING:
    from .listing import ListedRun

_RUN = click.Path(exists=True, file_okay=False, path_type=Path)


@click.group("runs")
def runs() -> None:
    """List the runs of a folder, or remove runs.

    \b
    Examples:
      rlhf runs list
      rlhf runs remove runs/first runs/second
    """


@runs.command("list", short_help="List the runs of a folder.")
@click.argument("folder", default="runs", metavar="[FOLDER]", type=_RUN)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with sizes in bytes and times in seconds.")
def list_runs(folder: Path, as_json: bool) -> None:
    """List the runs at or below a folder (default: runs), the most recently changed first.

    Held-out is the greedy score before and after training, reward the weighted score of the newest episode.

    \b
    Examples:
      rlhf runs list
      rlhf runs list experiments --json
    """
    from .listing import find_listed_runs, table

    found = find_listed_runs(folder)
    if as_json:
        print_json([each.to_json() for each in found])
    elif not found:
        echo(f"no runs in {folder}")
    else:
        for line in table(found):
            echo(line)


@runs.command("remove", short_help="Remove runs from the disk.")
@click.argument("paths", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--yes", "-y", is_flag=True, help="Remove without a question.")
def remove(paths: tuple[Path, ...], yes: bool) -> None:
    """Remove run folders with their models and checkpoints, after a question.

    Everything is checked before anything is removed. A run that is running, a folder that `rlhf train` did not write,
    and a link are refused. Files in a run folder that are not of the run are named in the question, and refused with
    --yes. Links inside a run are removed, not followed.

    \b
    Examples:
      rlhf runs remove runs/first
      rlhf runs remove runs/sweep-* --yes
    """
    from rlhf_core.errors import UserInputError

    from .listing import listed_run, size_text, table
    from .removal import check_removable, other_content, remove_run

    folders = [check_removable(path) for path in dict.fromkeys(paths)]
    listed: list[ListedRun] = [listed_run(str(each.path), each) for each in folders]
    others = {str(each.path): ", ".join(names) for each in folders if (names := other_content(each))}
    if yes and others:
        where, found = next(iter(others.items()))
        hint = "move that elsewhere, or repeat without --yes to remove it, too"
        raise UserInputError(f"also contains {found}, which may not be of the run", where=where, hint=hint)
    if not yes:
        for line in table(listed):
            echo(line)
        for where, found in others.items():
            echo(f"{where} also contains {found}, which may not be of the run")
        what = "this run" if len(listed) == 1 else f"these {len(listed)} runs"
        try:
            is_sure = click.confirm(f"Remove {what} ({size_text(sum(each.size_bytes for each in listed))})?")
        except click.Abort as error:
            raise UserInputError("nothing was removed: no answer", where="runs remove", hint="add --yes") from error
        if not is_sure:
            echo("nothing was removed")
            return
    for each in folders:
        remove_run(each)
        echo(f"removed {each.path}")
