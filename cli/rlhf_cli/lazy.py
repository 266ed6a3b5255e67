"""A click group whose commands are imported when they are run, not when they are listed."""

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


class LazyGroup(click.Group):
    """Shows a table of commands and imports the one that is run."""

    def __init__(self, name: str, commands: Mapping[str, LazyCommand], help: str) -> None:
        super().__init__(name=name, help=help)
        self._lazy = dict(commands)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Built-in commands in their table's order, then those of plugins."""
        return [*self._lazy, *self.plugin_commands()]

    def plugin_commands(self) -> dict[str, str]:
        """Commands that plugins add: name -> summary. A built-in of the same name wins."""
        return {}

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command; None where no command has that name."""
        if cmd_name in self._lazy:
            module, _, attribute = self._lazy[cmd_name].target.partition(":")
            command = getattr(import_module(module), attribute)
            assert isinstance(command, click.Command)
            return command
        return self.plugin_command(cmd_name)

    def plugin_command(self, name: str) -> click.Command | None:
        """A command that a plugin adds, imported."""
        return None

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
            ctx.fail(f"No such command '{name}'{told}.")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The table of commands, from the summaries."""
        rows = [(name, command.summary) for name, command in self._lazy.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)
        plugins = [(name, summary) for name, summary in self.plugin_commands().items()]
        if plugins:
            with formatter.section("Commands of plugins"):
                formatter.write_dl(plugins)


class RootGroup(LazyGroup):
    """The `rlhf` command: also holds the commands of plugins (entry points `rlhf.commands`)."""

    def plugin_commands(self) -> dict[str, str]:
        """Read from metadata; nothing is imported."""
        from rlhf_core.plugins.discovery import discover

        refs = discover("commands").values()
        return {ref.name: f"From {ref.distribution} {ref.version}." for ref in refs if ref.name not in self._lazy}

    def plugin_command(self, name: str) -> click.Command | None:
        """Import the plugin's command; a broken one is a `PluginError` that names it."""
        from rlhf_core.errors import PluginError
        from rlhf_core.plugins.discovery import discover, find, import_target
        from rlhf_core.util.did_you_mean import fold

        if fold(name) not in discover("commands"):
            return None
        ref = find("commands", name)
        command: Any = import_target(ref)
        if not isinstance(command, click.Command):
            raise PluginError(f"{ref.target} is a {type(command).__name__}, not a click command", where=ref.label)
        return command

    def home(self, name: str) -> str | None:
        """Our distribution that provides the command `name`, installed or not; None if there is none."""
        from rlhf_core.plugins.known import KNOWN

        return KNOWN["commands"].get(name)
