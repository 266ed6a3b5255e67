"""`rlhf plugins`: list installed plugins, show the options of one, and check that they work."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ..lazy import LazyCommand, LazyGroup
from ..output import echo, print_json, print_table

if TYPE_CHECKING:
    from rlhf_core.plugins.discovery import PluginRef

plugins = LazyGroup(
    "plugins",
    {
        "list": LazyCommand(f"{__name__}:list_plugins", "List installed plugins; imports none of them."),
        "show": LazyCommand(f"{__name__}:show", "Show one plugin and its options."),
        "check": LazyCommand("rlhf_cli.commands.plugins_check:check", "Try plugins and say which are broken."),
        "new": LazyCommand("rlhf_cli.commands.plugins_new:new", "Make a plugin to start from."),
    },
    help="""List, show and check installed plugins, or make a new one.

\b
Examples:
  rlhf plugins list --json
  rlhf plugins show algorithm/ppo
  rlhf plugins check
  rlhf plugins new reward brevity
""",
)


@click.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_plugins(as_json: bool) -> None:
    """List installed plugins: kind, name, distribution, version. Reads metadata only; imports none of them.

    \b
    Examples:
      rlhf plugins list
      rlhf plugins list --json
    """
    from rlhf_core.plugins.discovery import discover_all

    refs = [ref for by_name in discover_all().values() for first in by_name.values() for ref in (first, *first.clashes)]
    clashing = {id(each) for ref in refs if ref.clashes for each in (ref, *ref.clashes)}
    if as_json:
        print_json([{**_row(ref), "missing": ref.missing, "clash": id(ref) in clashing} for ref in refs])
        return
    rows = [[*_row(ref).values(), _trouble(ref, id(ref) in clashing)] for ref in refs]
    print_table(["kind", "name", "distribution", "version", "target", ""], rows)


def _trouble(ref: PluginRef, clashes: bool) -> str:
    if clashes:
        return "CLASH: given twice"
    if ref.missing:
        return f"needs {', '.join(ref.missing)}: see rlhf plugins show {ref.kind}/{ref.name}"
    return ""


def _row(ref: PluginRef) -> dict[str, str]:
    return {
        "kind": ref.kind,
        "name": ref.name,
        "distribution": ref.distribution,
        "version": ref.version,
        "target": ref.target,
    }


@click.command("show")
@click.argument("plugin", metavar="KIND/NAME")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with the JSON schema of the options.")
def show(plugin: str, as_json: bool) -> None:
    """Show a plugin: what it is, where it comes from, what it needs, and its options with type and bounds.

    \b
    Examples:
      rlhf plugins show algorithm/ppo
      rlhf plugins show rewards/exact-match --json
    """
    from rlhf_core.components import KINDS
    from rlhf_core.config.resolve import options_of_core
    from rlhf_core.plugins.discovery import as_kind, find, install_line, load, missing_modules

    kind_name, slash, name = plugin.partition("/")
    if not slash or not name:
        raise click.UsageError(f'"{plugin}" is not KIND/NAME; try: rlhf plugins show algorithm/{plugin}')
    kind = as_kind(kind_name)
    if kind not in KINDS:
        ref = find(kind, name)
        print_table(["", ""], [[key, value] for key, value in _row(ref).items()])
        return
    selected = load(kind, name, check_requires=False)
    missing = missing_modules(selected.component)
    about = {
        "kind": kind,
        "name": selected.name,
        "summary": selected.component.summary,
        "distribution": selected.distribution,
        "version": selected.version,
    }
    own, core = selected.component.config, options_of_core(selected)
    if as_json:
        schemas = {"options": own.model_json_schema(), "options_of_core": core.model_json_schema() if core else None}
        print_json({**about, "missing": missing, **schemas})
        return
    from ..schema_text import option_rows

    echo(f"{kind}/{selected.name} ({selected.distribution} {selected.version}): {selected.component.summary}")
    if missing:
        echo(f"needs: {', '.join(missing)}, not installed; {install_line(selected.component, missing)}")
    rows = option_rows(own)
    if rows:
        print_table(["option", "type", "default", "description"], rows)
    else:
        echo("no options" if core is None else "no options of its own")
    if core is not None:
        echo("")
        print_table(["read by core", "type", "default", "description"], option_rows(core))
