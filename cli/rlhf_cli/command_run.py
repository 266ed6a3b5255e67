"""The run that a command line describes, for commands of plugins: their parameter `run`."""

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
    """The command with RUN.yaml and the flags of `rlhf train` if its function has a parameter `run` without an option.

    The function gets a function as its `run`, which takes the number of training processes, checks the run as
    `rlhf train --dry-run` does, but runs no code from files, and returns the resolved run and its inputs. It raises
    `UserInputError`. Any other command is returned as it is.
    """
    function = command.callback
    has_own = any(param.name == _PARAMETER for param in command.params)
    if function is None or has_own or _PARAMETER not in inspect.signature(function).parameters:
        return command

    def call(*, request: RunArguments, **values: Any) -> Any:
        return function(run=partial(_checked, request, f"rlhf {command.name}"), **values)

    described = click.command(command.name)(run_options(call))
    changed = copy.copy(command)
    changed.params = [*described.params, *command.params]
    changed.callback = described.callback
    return changed


def _checked(request: RunArguments, command: str, num_processes: int = 1) -> tuple[ResolvedRun, RunInputs]:
    """Check the run without running code from files, and report on stderr what was not run. command: for errors."""
    from rlhf_core.config.processes import check_processes
    from rlhf_core.entry.train import check_run
    from rlhf_core.errors import ConfigError

    resolved = request.resolved()
    if resolved.run.model.trust_remote_code:
        message = f"is set, but {command} runs no code that comes with a model"
        raise ConfigError(message, where="model.trust_remote_code")
    _refuse_files(resolved, command)
    check_processes(resolved, num_processes)
    return resolved, check_run(resolved)


def _refuse_files(resolved: ResolvedRun, command: str) -> None:
    """Raise `ConfigError` if a file would have to be run: one that the algorithm or a prompt source names."""
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
                f"{command} runs no code from files, and the run names {files[0]}",
                where=place,
                hint=f"use one that is installed and needs as much: --set {place}=NAME; without a filter: "
                f"--set {place}.filter=null",
            )
