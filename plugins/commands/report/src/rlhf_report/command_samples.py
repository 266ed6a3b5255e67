"""`rlhf samples`: shows answers of a run's policy in the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from .terminal import echo, heading, print_json

_GROUPS = ("best", "worst", "random", "first", "last")


@click.command("samples")
@click.argument("run_dir", metavar="RUN_DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--show",
    "groups",
    multiple=True,
    type=click.Choice(_GROUPS),
    help="Best or worst by weighted score, random, or those of the first or last policy. Repeatable.  [default: all]",
)
@click.option("--number", type=click.IntRange(1, 24), default=3, show_default=True, help="Samples per group.")
@click.option("--episode", type=click.IntRange(min=1), help="Only this episode, numbered as in the progress display.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: group -> lines of samples.jsonl.")
def samples(run_dir: Path, groups: tuple[str, ...], number: int, episode: int | None, as_json: bool) -> None:
    """Show prompts, answers and rewards of a finished or running run, and an environment's episodes turn by turn.

    \b
    Examples:
      rlhf samples runs/first
      rlhf samples runs/first --show best --show worst --number 5
      rlhf samples runs/first --episode 12 --show random --json
    """
    from rlhf_core.errors import UserInputError
    from rlhf_core.runfolder import RunFolder

    from .data import read_samples
    from .samples import choose_samples

    folder = RunFolder.read(run_dir)
    records = (line for line in read_samples(folder) if episode is None or line.get("episode") == episode - 1)
    choice = choose_samples(records, number)
    chosen = {name: choice.groups[name] for name in _GROUPS if name in choice.groups and (not groups or name in groups)}
    if not chosen:
        is_selection = choice.total or episode is not None
        message, hint = _missing_samples(is_running=folder.is_in_use)
        raise UserInputError(
            f"none of the samples match ({choice.total} considered)" if is_selection else message,
            where=str(folder.samples),
            hint="first and last are shown only if there are two policies" if is_selection else hint,
        )
    if as_json:
        print_json(chosen)
        return
    echo(f"{choice.total} samples in {folder.samples}")
    for name, members in chosen.items():
        echo("")
        heading(name.upper(), bold=True)
        for sample in members:
            _show(sample)


def _missing_samples(*, is_running: bool) -> tuple[str, str]:
    """Message and hint for a run that has not written samples."""
    reason = "runs that train on a dataset do not sample, and logging.samples: none disables the file"
    if is_running:
        return "the run is in progress and has not written samples yet", f"try again after an episode ({reason})"
    return "the run has not written samples", reason


def _show(sample: Mapping[str, Any]) -> None:
    """Print a sample: a line of numbers, the prompt, and the answer or an episode's turns, uncut."""
    from .conversation import conversation_lines
    from .numbers import number

    rewards = sample.get("rewards") or {}
    facts = [
        f"#{sample.get('sample_id')}" + (f" branch {sample['branch']}" if sample.get("branch") else ""),
        f"episode {int(sample.get('episode', 0)) + 1}",
        f"policy {sample.get('policy_version')}",
        *([] if sample.get("score") is None else [f"weighted score {number(sample['score'])}"]),
        *(f"{name} {number(value)}" for name, value in rewards.items()),
        f"{sample.get('num_tokens')} tokens",
        str(sample.get("finish_reason")),
    ]
    heading("  ".join(facts), dim=True)
    for line in conversation_lines(sample):
        echo(line)
