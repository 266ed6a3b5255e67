"""`rlhf plugins new`: the distribution of a plugin that installs, passes its contract tests and trains at once."""

from __future__ import annotations

from pathlib import Path

import click

from ..output import echo


@click.command("new", short_help="Make a plugin to start from.")
@click.argument("kind")
@click.argument("name")
@click.option("--output", type=click.Path(path_type=Path), help="The folder to make.  [default: rlhf-KIND-NAME]")
def new(kind: str, name: str, output: Path | None) -> None:
    """Make a plugin: KIND is reward, algorithm, advantage, policy-loss, strategy, engine, transport,
    prompts, environment, hooks, logger, section, optimizer or schedule.

    The folder is a Python distribution with one entry point, the contract tests of its kind, and a run file.

    \b
    Examples:
      rlhf plugins new reward brevity
      rlhf plugins new algorithm my-update --output ~/plugins/my-update
    """
    from rlhf_core.plugins.discovery import as_kind

    from ..scaffold import new_plugin

    made = new_plugin(as_kind(kind), name, output)
    for path in made.files:
        echo(f"wrote {made.folder / path}")
    echo(f"next: pip install -e '{made.folder}[test]'; pytest {made.folder}; rlhf train {made.folder / 'run.yaml'}")
