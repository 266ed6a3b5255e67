"""Click groups: one whose commands are imported when they are run, not when they are listed."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple

import click


class LazyCommand(NamedTuple):
    """Import path of a command, and its summary line in `--help`."""

    target: str
    """`module:attr` of a click command."""
    summary: str


class Group(click.Group):
    """A group that lists its commands in order, and suggests similar names for one that is not there."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order in which they were added."""
        return list(self.commands)

    def home(self, name: str) -> str | None:
        """The distribution that would bring a command which is not there."""
        return None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Like click's, but suggests similar names without importing any command."""
        from rlhf_core.util.did_you_mean import suggestion

        name = args[0]
        known = self.list_commands(ctx)
        if name not in known and not name.startswith("-"):
            home = self.home(name)
            told = suggestion(name, known) if home is None else f"; it is in a plugin: pip install {home}"
            ctx.fail(f"No such command '{name}'{told}" + ("" if told.endswith("?") else "."))
        return super().resolve_command(ctx, args)


def _version(ctx: click.Context, param: click.Parameter, asked: bool) -> None:
    if asked and not ctx.resilient_parsing:
        command = ctx.command.get_command(ctx, "version") if isinstance(ctx.command, click.Group) else None
        assert command is not None
        ctx.invoke(command)
        ctx.exit()


class LazyGroup(Group):
    """The `rlhf` command: a table of commands and those of plugins (`rlhf.commands`); imports the one that is run."""

    def __init__(self, name: str, commands: Mapping[str, LazyCommand], help: str) -> None:
        super().__init__(name=name, help=help, context_settings={"help_option_names": ["--help", "-h"]})
        self._lazy = dict(commands)
        told = "Print the versions of the parts, like `rlhf version`."
        self.params.append(
            click.Option(["--version"], is_flag=True, is_eager=True, expose_value=False, callback=_version, help=told)
        )

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Built-in commands in their table's order, then those of plugins."""
        return [*self._lazy, *self._of_plugins()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command; None where no command has that name. A broken plugin's is a `PluginError`."""
        if cmd_name in self._lazy:
            module, _, attribute = self._lazy[cmd_name].target.partition(":")
            command = getattr(import_module(module), attribute)
            assert isinstance(command, click.Command)
            return command
        from rlhf_core.errors import PluginError
        from rlhf_core.plugins.discovery import discover, find, import_target
        from rlhf_core.util.did_you_mean import fold

        if fold(cmd_name) not in discover("commands"):
            return None
        ref = find("commands", cmd_name)
        found: Any = import_target(ref)
        if not isinstance(found, click.Command):
            raise PluginError(f"{ref.target} is a {type(found).__name__}, not a click command", where=ref.label)
        from .command_run import with_run

        return with_run(found)

    def home(self, name: str) -> str | None:
        """Our distribution that provides the command `name`, installed or not; None if there is none."""
        from rlhf_core.plugins.names import KNOWN

        return KNOWN["commands"].get(name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The table of commands, from the summaries."""
        tables = {
            "Commands": {name: command.summary for name, command in self._lazy.items()},
            "Commands of plugins": self._of_plugins(),
        }
        for title, rows in tables.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(list(rows.items()))

    def _of_plugins(self) -> dict[str, str]:
        """Name -> summary, from metadata; a built-in of the same name wins."""
        from rlhf_core.plugins.discovery import discover

        refs = discover("commands").values()
        return {ref.name: f"From {ref.distribution} {ref.version}." for ref in refs if ref.name not in self._lazy}
