"""`rlhf config`: show a resolved run file, check one, and print the JSON schema of run files."""

from __future__ import annotations

import os
from pathlib import Path

import click

from ..lazy import CommandGroup
from ..output import echo, json_text, print_json
from ..run_arguments import RunArguments, run_options

MARK = "# yaml-language-server: $schema="
"""Beginning of the line of a run file that names its schema, for editors."""

config = CommandGroup(
    "config",
    help="""Show and check run files, and their schema.

\b
Examples:
  rlhf config show run.yaml --set optimizer.lr=1e-6
  rlhf config check run.yaml
  rlhf config schema --output run.schema.json
""",
)


@config.command("show", short_help="Print a run with every default filled in.")
@run_options
def show(request: RunArguments) -> None:
    """Print the resolved run as YAML: file, flags, --set and every default.

    Code files that the run names are not executed. `train` checks them and their options.
    Without RUN.yaml, print the quickstart's second stage.

    \b
    Examples:
      rlhf config show run.yaml
      rlhf config show --algorithm ppo --strategy gemini
    """
    from rlhf_core.util.redact import redact_mapping
    from rlhf_core.util.yaml12 import dump_yaml

    echo(dump_yaml(redact_mapping(request.resolved().to_mapping())), newline=False)


@config.command("check", short_help="Check a run file.")
@run_options
def check(request: RunArguments) -> None:
    """Check every option and plugin of a run file with its flags. List all problems and exit with 2 if there are any.

    Code files that the run names are not executed. `train` checks them and their options.

    \b
    Examples:
      rlhf config check run.yaml
      rlhf config check run.yaml --transport ray --set transport.num_makers=2
    """
    from rlhf_core.config.resolved import weights_of

    run = request.resolved()
    rewards = ", ".join(weights_of(run.rewards)) or "none"
    echo(
        f"ok: {request.where}: algorithm {run.algorithm.name}, strategy {run.strategy.name}, "
        f"engine {run.engine.name}, transport {run.transport.name}, rewards {rewards}"
    )
    for change in run.adapted:
        echo(f"adapted to the run: {change}")


@config.command("schema", short_help="Print the JSON schema of run files.")
@click.option("--output", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path), help="Write it to FILE.")
def schema(output: Path | None) -> None:
    """Print the JSON schema of run files, with the options of every installed plugin.

    Editors with a YAML language server use it to complete and check a run file whose first line names the schema.
    Write the schema again when plugins change. Plugins that cannot be imported are reported on stderr and left out.

    \b
    Examples:
      rlhf config schema --output run.schema.json
      sed -i '1i # yaml-language-server: $schema=run.schema.json' run.yaml
    """
    from rlhf_core.errors import UserInputError
    from rlhf_core.util.files import write_bytes

    from ..run_schema import run_schema

    document, left_out = run_schema()
    for error in left_out:
        echo(f"note: {error.message} ({error.where})", err=True)
    if output is None:
        print_json(document)
        return
    try:
        write_bytes(output, f"{json_text(document)}\n".encode())
    except OSError as error:
        reason = f"cannot be written: {error.strerror or error}"
        raise UserInputError(reason, where=str(output), hint="choose another --output") from error
    echo(f"wrote {output}. First line of a run file in its folder: {MARK}{os.path.basename(output)}")
