"""Options of the commands that let a model act in an environment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rlhf_core.config.resolved import SelectedEnvironment

_OPTIONS = (
    click.option("--environment", metavar="NAME", help="Play episodes of this environment: NAME or FILE.py:CLASS."),
    click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="environment.KEY=VALUE",
        help="Set an option of the environment, the value in YAML: --set environment.max_turns=4. Repeatable.",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentRequest:
    """An environment chosen on the command line."""

    name: str | None
    overrides: tuple[str, ...]

    def select(self) -> SelectedEnvironment | None:
        """The environment with its options; None where none was requested. Raises `ConfigError`."""
        from rlhf_core.config.load import ENVIRONMENT_SECTION, load_run
        from rlhf_core.config.problems import Problems
        from rlhf_core.config.resolve import resolve_environment

        if self.name is None:
            if self.overrides:
                raise click.UsageError("--set is for options of an environment: name it with --environment")
            return None
        run = load_run({ENVIRONMENT_SECTION: {"name": self.name}}, self.overrides)
        others = sorted(set(run) - {ENVIRONMENT_SECTION})
        if others:
            raise click.UsageError(f"--set {others[0]}…: only options of the environment are set here")
        problems = Problems()
        environment = resolve_environment(run[ENVIRONMENT_SECTION], problems)
        problems.raise_if_any("--environment")
        return environment


def environment_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options to a command, which gets them as its `playing`."""

    @wraps(function)
    def with_environment(environment: str | None, overrides: tuple[str, ...], **values: Any) -> None:
        function(playing=EnvironmentRequest(name=environment, overrides=overrides), **values)

    for option in reversed(_OPTIONS):
        with_environment = option(with_environment)
    return with_environment
