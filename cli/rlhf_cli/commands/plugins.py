"""`rlhf plugins`: list installed plugins, show the options of one, and check that they work."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ..lazy import Group
from ..output import echo, print_json, print_table
from .plugins_check import check
from .plugins_new import new

if TYPE_CHECKING:
    from rlhf_core.plugins.discovery import PluginRef

plugins = Group(
    "plugins",
    help="""List, show and check installed plugins, or make a new one.

\b
Examples:
  rlhf plugins list --json
  rlhf plugins show algorithm/ppo
  rlhf plugins check
  rlhf plugins new reward brevity
""",
)


_CLICK_MARK = "\b\n"
"""Marker that keeps click from wrapping a paragraph of a command's help."""


@plugins.command("list", short_help="List installed plugins; imports none of them.")
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


@plugins.command("show", short_help="Show one plugin and its options.")
@click.argument("plugin", metavar="[KIND/]NAME")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with the JSON schema of the options.")
def show(plugin: str, as_json: bool) -> None:
    """Show a plugin: what it is, where it comes from, what it needs, and its options with type and bounds.

    The kind may be left out where the name is given once.

    \b
    Examples:
      rlhf plugins show ppo
      rlhf plugins show policy-loss/clip
      rlhf plugins show rewards/exact-match --json
    """
    from rlhf_core.components import KINDS
    from rlhf_core.config.select import shared_options
    from rlhf_core.plugins.discovery import as_kind, find
    from rlhf_core.plugins.requirements import missing_modules, unmet
    from rlhf_core.plugins.selected import has_options, load

    kind_name, slash, name = plugin.partition("/")
    kind, name = (as_kind(kind_name), name) if slash and name else (_kind_of(plugin), plugin)
    ref = find(kind, name)
    if kind not in KINDS or not has_options(ref):
        _show_other(ref, as_json)
        return
    selected = load(kind, name, check_requires=False)
    lack = unmet(selected.component, selected.distribution)
    about = {
        "kind": kind,
        "name": selected.name,
        "summary": selected.component.summary,
        "distribution": selected.distribution,
        "version": selected.version,
    }
    own, core = selected.component.config, shared_options(kind)
    core = None if core is None or issubclass(own, core) else core
    if as_json:
        schemas = {"options": own.model_json_schema(), "options_of_core": core.model_json_schema() if core else None}
        print_json({**about, "missing": missing_modules(selected.component), **schemas})
        return
    from ..schema_text import option_rows

    echo(f"{kind}/{selected.name} ({selected.distribution} {selected.version}): {selected.component.summary}")
    if lack is not None:
        echo(": ".join(lack))
    if (told := _more_than_a_line(selected.function)) is not None:
        echo(f"\n{told}\n")
    rows = option_rows(own)
    if rows:
        print_table(["option", "type", "default", "description"], rows)
    else:
        echo("no options" if core is None else "no options of its own")
    if core is not None:
        echo("")
        print_table(["read by core", "type", "default", "description"], option_rows(core))


plugins.add_command(check)
plugins.add_command(new)


def _kind_of(name: str) -> str:
    """The one kind that has a plugin of this name. Raises `PluginError` for none or several."""
    from rlhf_core.errors import PluginError
    from rlhf_core.plugins.discovery import discover_all
    from rlhf_core.plugins.names import KNOWN
    from rlhf_core.util.did_you_mean import fold, suggestion

    installed = discover_all()
    kinds = [kind for kind, refs in installed.items() if fold(name) in refs]
    if len(kinds) == 1:
        return kinds[0]
    if kinds:
        shown = " or ".join(f"{kind}/{name}" for kind in kinds)
        raise PluginError(f'"{name}" is the name of {len(kinds)} plugins', hint=f"rlhf plugins show {shown}")
    homes = {home for known in KNOWN.values() for each, home in known.items() if fold(each) == fold(name)}
    known = [ref.name for refs in installed.values() for ref in refs.values()]
    hint = f"pip install {' or '.join(sorted(homes))}" if homes else "rlhf plugins list"
    raise PluginError(f'no plugin "{name}" is installed{suggestion(name, known)}', hint=hint)


def _show_other(ref: PluginRef, as_json: bool) -> None:
    """A function that algorithms call by name, with its options; a command, a server, a module of hooks."""
    from inspect import getdoc

    from rlhf_core.plugins.discovery import import_target
    from rlhf_core.plugins.functions import options_model

    found = import_target(ref)
    is_function = ref.kind in ("advantages", "policy_losses")
    model = options_model(found, ref.label, takes=None) if is_function else None
    told = getdoc(found) if is_function or ref.kind == "hooks" else getattr(found, "help", None) or getdoc(found)
    if as_json:
        print_json({**_row(ref), "doc": told, "options": model.model_json_schema() if model else None})
        return
    from ..schema_text import option_rows

    echo(f"{ref.kind}/{ref.name} ({ref.distribution} {ref.version}): {ref.target}")
    if told:
        echo(f"\n{told.replace(_CLICK_MARK, '').strip()}\n")
    if ref.kind == "hooks":
        echo("on where it is installed")
    if model is not None and (rows := option_rows(model)):
        print_table(["option", "type", "default"], [row[:3] for row in rows])
    elif model is not None:
        echo("no options")


def _more_than_a_line(function: object) -> str | None:
    """The docstring of a function or class without its summary."""
    from inspect import getdoc

    told = getdoc(function) if function is not None else None
    return (told or "").partition("\n")[2].strip() or None
