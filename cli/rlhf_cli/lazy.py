"""Click groups with suggestions for misspelled commands, and with commands that are imported only when run."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple

import click


class LazyCommand(NamedTuple):
    """Import path of a command, and its summary in `--help`."""

    target: str
    """`module:attr` of a click command."""
    summary: str


class CommandGroup(click.Group):
    """A group that lists its commands in order, and suggests similar names for an unknown one."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order in which they were added."""
        return list(self.commands)

    def home(self, name: str) -> str | None:
        """Return the distribution that provides a command which is not installed. None if unknown."""
        return None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve like click, but suggest similar names without importing any command."""
        from rlhf_core.util.did_you_mean import suggestion

        name = args[0]
        known = self.list_commands(ctx)
        if name not in known and not name.startswith("-"):
            home = self.home(name)
            hint = suggestion(name, known) if home is None else f". It is in a plugin: pip install {home}"
            ctx.fail(f"No such command '{name}'{hint}" + ("" if hint.endswith("?") else "."))
        return super().resolve_command(ctx, args)


def _version(ctx: click.Context, param: click.Parameter, is_set: bool) -> None:
    if is_set and not ctx.resilient_parsing:
        command = ctx.command.get_command(ctx, "version") if isinstance(ctx.command, click.Group) else None
        assert command is not None
        ctx.invoke(command)
        ctx.exit()


class LazyGroup(CommandGroup):
    """The `rlhf` command: built-in commands and those of plugins (`rlhf.commands`). Imports only the one that runs."""

    def __init__(self, name: str, commands: Mapping[str, LazyCommand], help: str) -> None:
        super().__init__(name=name, help=help, context_settings={"help_option_names": ["--help", "-h"]})
        self._lazy = dict(commands)
        text = "Print the versions of the parts, like `rlhf version`."
        self.params.append(
            click.Option(["--version"], is_flag=True, is_eager=True, expose_value=False, callback=_version, help=text)
        )

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return built-in commands in their table's order, then those of plugins."""
        return [*self._lazy, *self._plugin_summaries()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command. None if it does not exist. Raises `PluginError` if its plugin is broken."""
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
        target: Any = import_target(ref)
        if not isinstance(target, click.Command):
            raise PluginError(f"{ref.target} is a {type(target).__name__}, not a click command", where=ref.label)
        from .command_run import with_run

        return with_run(target)

    def home(self, name: str) -> str | None:
        """Return our distribution that provides the command `name`, installed or not. None if unknown."""
        from rlhf_core.plugins.names import KNOWN

        return KNOWN["commands"].get(name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the table of commands from their summaries."""
        tables = {
            "Commands": {name: command.summary for name, command in self._lazy.items()},
            "Commands of plugins": self._plugin_summaries(),
        }
        for title, rows in tables.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(list(rows.items()))

    def _plugin_summaries(self) -> dict[str, str]:
        """Name -> summary of plugin commands, from metadata. A built-in command with the same name wins."""
        from rlhf_core.plugins.discovery import discover

        refs = discover("commands").values()
        return {ref.name: f"From {ref.distribution} {ref.version}." for ref in refs if ref.name not in self._lazy}
