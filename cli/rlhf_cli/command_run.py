"""The parameter `run` of plugin commands: the run that the command line describes."""

from __future__ import annotations

import copy
import inspect
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from .run_arguments import RunArguments, run_options

if TYPE_CHECKING:
    from rlhf_core.config.resolve import ResolvedRun
    from rlhf_core.wiring import RunInputs

_PARAMETER = "run"


def with_run(command: click.Command) -> click.Command:
    """Add RUN.yaml and the flags of `rlhf train` to a command whose function has a parameter `run` without an option.

    The value of `run` is a function of the number of training processes. It checks the run like
    `rlhf train --dry-run`, but without executing code from files, and returns the resolved run and its inputs. It
    raises `UserInputError`. Any other command is returned unchanged.
    """
    function = command.callback
    has_own = any(param.name == _PARAMETER for param in command.params)
    if function is None or has_own or _PARAMETER not in inspect.signature(function).parameters:
        return command

    def call(*, request: RunArguments, **values: Any) -> Any:
        return function(run=partial(_resolve_and_check, request, f"rlhf {command.name}"), **values)

    with_options = click.command(command.name)(run_options(call))
    extended = copy.copy(command)
    extended.params = [*with_options.params, *command.params]
    extended.callback = with_options.callback
    return extended


def _resolve_and_check(request: RunArguments, command: str, num_processes: int = 1) -> tuple[ResolvedRun, RunInputs]:
    """Check the run without executing code from files, and report skipped files on stderr.

    Args:
        request: The run as described on the command line.
        command: Name of the command, for errors.
        num_processes: Number of training processes.
    """
    from rlhf_core.config.processes import check_processes
    from rlhf_core.entry.train import check_run
    from rlhf_core.errors import ConfigError

    resolved = request.resolved()
    if resolved.run.model.trust_remote_code:
        message = f"is set, but {command} does not run code that comes with a model"
        raise ConfigError(message, where="model.trust_remote_code")
    _refuse_files(resolved, command)
    check_processes(resolved, num_processes)
    return resolved, check_run(resolved)


def _refuse_files(resolved: ResolvedRun, command: str) -> None:
    """Raise `ConfigError` if the algorithm or a prompt source names a code file, which would have to be executed."""
    from rlhf_core.errors import ConfigError
    from rlhf_core.plugins.trust import referenced_files

    run = resolved.to_mapping()
    evaluation = run["eval"] or {"prompts": None, "sets": {}}
    sections = {"algorithm": run["algorithm"], "prompts": run["prompts"]}
    sections["eval.prompts"] = evaluation["prompts"]
    sections |= {f"eval.sets.{name}.prompts": each["prompts"] for name, each in evaluation["sets"].items()}
    for place, section in sections.items():
        if files := sorted(map(str, referenced_files(section))):
            raise ConfigError(
                f"{command} does not run code from files, and the run names {files[0]}",
                where=place,
                hint=f"select a similar installed plugin (--set {place}=NAME), or remove a filter "
                f"(--set {place}.filter=null)",
            )
