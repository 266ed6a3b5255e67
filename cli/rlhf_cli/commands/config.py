"""`rlhf config`: show a resolved run file, check one, and print the JSON schema of run files."""

from __future__ import annotations

from ..lazy import Group
from ..output import echo, print_json
from ..run_arguments import RunArguments, run_options

config = Group(
    "config",
    help="""Show and check run files, and their schema.

\b
Examples:
  rlhf config show run.yaml --set optimizer.lr=1e-6
  rlhf config check run.yaml
  rlhf config schema > run.schema.json
""",
)


@config.command("show", short_help="Print a run with every default filled in.")
@run_options
def show(request: RunArguments) -> None:
    """Print the run as it will be used: file, flags, --set and every default, as YAML.

    Code files that the run names are not run: `train` checks what they define, and its options.
    With no RUN.yaml, the quickstart's second stage.

    \b
    Examples:
      rlhf config show run.yaml
      rlhf config show --algorithm ppo --strategy gemini
    """
    from rlhf_core.util.redact import redact_mapping
    from rlhf_core.util.yaml12 import dump_yaml

    echo(dump_yaml(redact_mapping(request.resolved().to_mapping())), newline=False)


@config.command("check", short_help="Say whether a run file is right.")
@run_options
def check(request: RunArguments) -> None:
    """Check a run file with its flags: every option, every plugin. Exits 2 and lists what is wrong.

    Code files that the run names are not run: `train` checks what they define, and its options.

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
def schema() -> None:
    """Print the JSON schema of run files, with the options of every installed plugin.

    Editors complete and check YAML by it. Plugins that cannot be imported are named on stderr and left out.

    \b
    Examples:
      rlhf config schema > run.schema.json
    """
    from ..run_schema import run_schema

    document, left_out = run_schema()
    for error in left_out:
        echo(f"note: {error.message} ({error.where})", err=True)
    print_json(document)
