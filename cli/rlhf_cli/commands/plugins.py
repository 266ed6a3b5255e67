"""`rlhf plugins`: list installed plugins, show the options of one, check plugins, and create a new one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..lazy import CommandGroup
from ..output import echo, print_json, print_table

if TYPE_CHECKING:
    from rlhf_core.plugins.discovery import PluginRef

plugins = CommandGroup(
    "plugins",
    help="""List, show and check installed plugins, or create a new one.

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


@plugins.command("list", short_help="List installed plugins without importing them.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_plugins(as_json: bool) -> None:
    """List installed plugins: kind, name, distribution, version. Reads metadata only, without importing plugins.

    \b
    Examples:
      rlhf plugins list
      rlhf plugins list --json
    """
    refs = [ref for first in _named(None) for ref in (first, *first.clashes)]
    clashing = {id(each) for ref in refs if ref.clashes for each in (ref, *ref.clashes)}
    if as_json:
        print_json([{**_row(ref), "missing": ref.missing, "clash": id(ref) in clashing} for ref in refs])
        return
    rows = [[*_row(ref).values(), _problem(ref, id(ref) in clashing)] for ref in refs]
    print_table(["kind", "name", "distribution", "version", "target", ""], rows)


def _problem(ref: PluginRef, clashes: bool) -> str:
    if clashes:
        return "CLASH: provided twice"
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
    """Show a plugin: its description, distribution, requirements, and options with types and bounds.

    The kind may be left out if only one plugin has the name.

    \b
    Examples:
      rlhf plugins show ppo
      rlhf plugins show policy-loss/clip
      rlhf plugins show rewards/exact-match --json
    """
    from inspect import getdoc

    from rlhf_core.components import KINDS
    from rlhf_core.config.select import shared_options
    from rlhf_core.errors import PluginError
    from rlhf_core.plugins.discovery import find, import_target
    from rlhf_core.plugins.functions import PLAIN
    from rlhf_core.plugins.requirements import not_installed, unmet
    from rlhf_core.plugins.selected import has_options, load

    refs = _named(plugin)
    if len(refs) > 1:
        shown = " or ".join(f"{each.kind}/{each.name}" for each in refs)
        raise PluginError(f'"{plugin}" is the name of {len(refs)} plugins', hint=f"rlhf plugins show {shown}")
    ref = find(refs[0].kind, refs[0].name)
    about: dict[str, object] = {**_row(ref), "summary": "", "missing": ()}
    own = core = unmet_needs = None
    if ref.kind in {*KINDS, *PLAIN} and has_options(ref):
        selected = load(ref.kind, ref.name, check_requires=False)
        component = selected.component
        doc = getdoc(selected.function) if selected.function is not None else component.summary
        own, core = component.config, shared_options(ref.kind)
        core = None if core is None or issubclass(own, core) else core
        unmet_needs = unmet(component, selected.distribution)
        about |= {"summary": component.summary, "missing": not_installed(component.requires)}
    else:  # a command, a server, a module of hooks
        target = import_target(ref)
        doc = getattr(target, "help", None) or getdoc(target)
    if as_json:
        schemas = {"options": own and own.model_json_schema(), "options_of_core": core and core.model_json_schema()}
        print_json({**about, "doc": doc, **schemas})
        return
    from ..schema_text import option_rows

    headers = ["type", "default", "description"]
    echo(f"{ref.kind}/{ref.name} ({ref.distribution} {ref.version}): {about['summary'] or ref.target}")
    if unmet_needs is not None:
        echo(": ".join(unmet_needs))
    if rest := (doc or "").replace(_CLICK_MARK, "").removeprefix(str(about["summary"])).strip():
        echo(f"\n{rest}\n")
    if ref.kind == "hooks" and own is None:
        echo("enabled once it is installed")
    if own is not None and (rows := option_rows(own)):
        print_table(["option", *headers], rows)
    elif own is not None:
        echo("no options" if core is None else "no additional options")
    if core is not None:
        echo("")
        print_table(["read by core", *headers], option_rows(core))


@plugins.command("check", short_help="Test plugins and report broken ones.")
@click.argument("name", metavar="[NAME | KIND/NAME]", required=False)
def check(name: str | None) -> int:
    """Import every plugin and check its declarations, in a separate process and without a GPU.

    With NAME, also run the contract suite of its kind with default options. A plugin that needs other options is
    "not run". Exits with 1 if a plugin is broken. A missing optional dependency is reported but is not a failure.

    \b
    Examples:
      rlhf plugins check
      rlhf plugins check ppo
      rlhf plugins check reward/exact-match
    """
    from rlhf_core.errors import PluginError
    from rlhf_core.plugins.discovery import unread_entry_points

    try:
        from rlhf_testing.probe import probe
    except ModuleNotFoundError as missing:
        raise PluginError("`rlhf plugins check` needs rlhf-testing", hint="pip install rlhf-core[testing]") from missing

    refs = _named(name)
    verdicts = probe(refs, whole=name is not None)
    rows = [
        [f"{ref.kind}/{ref.name}", f"{ref.distribution} {ref.version}", *verdict]
        for ref, verdict in zip(refs, verdicts, strict=True)
    ]
    print_table(["plugin", "distribution", "status", "detail"], rows)
    stray_groups = [] if name is not None else unread_entry_points()
    for message in stray_groups:
        echo(f"error: {message}", err=True)
    return int(bool(stray_groups) or any(verdict.status == "broken" for verdict in verdicts))


def _named(name: str | None) -> list[PluginRef]:
    """Return the plugins named NAME or KIND/NAME, or all plugins if `name` is None. Raises `PluginError`."""
    from rlhf_core.errors import PluginError
    from rlhf_core.plugins.discovery import GROUPS, discover, unread_entry_points
    from rlhf_core.plugins.names import KNOWN
    from rlhf_core.util.did_you_mean import fold, suggestion

    installed = {kind: discover(kind) for kind in GROUPS}
    if name is None:
        return [ref for by_name in installed.values() for ref in by_name.values()]
    kind_name, slash, last = name.rpartition("/")
    kinds = [_kind(kind_name)] if slash else list(installed)
    found = [installed[kind][fold(last)] for kind in kinds if fold(last) in installed[kind]]
    if not found:
        known = [ref.name for kind in kinds for ref in installed[kind].values()]
        homes = {home for kind in kinds for each, home in KNOWN.get(kind, {}).items() if fold(each) == fold(last)}
        hint = "; ".join(unread_entry_points(last)) or (
            f"pip install {' or '.join(sorted(homes))}" if homes else "rlhf plugins list"
        )
        raise PluginError(f'no plugin "{name}" is installed{suggestion(last, known)}', hint=hint)
    return found


def _kind(name: str) -> str:
    """Return the kind as in the entry-point group (`Algorithm` -> `algorithms`), or raise `PluginError`."""
    from rlhf_core.errors import PluginError
    from rlhf_core.plugins.discovery import GROUPS, SINGULAR
    from rlhf_core.util.did_you_mean import fold, suggestion

    folded = fold(name)
    for kind in GROUPS:
        if folded in (fold(kind), fold(SINGULAR[kind].replace(" ", "-")), kind.removesuffix("s")):
            return kind
    raise PluginError(f'no plugin kind "{name}"{suggestion(name, GROUPS)}', hint=f"kinds: {', '.join(GROUPS)}")


@plugins.command("new", short_help="Create a plugin to start from.")
@click.argument("kind")
@click.argument("name")
@click.option("--output", type=click.Path(path_type=Path), help="The folder to create.  [default: rlhf-KIND-NAME]")
def new(kind: str, name: str, output: Path | None) -> None:
    """Create a plugin. KIND is reward, algorithm, advantage, policy-loss, strategy, engine, transport,
    prompts, environment, hooks, logger, section, optimizer or schedule.

    The folder is a Python distribution with one entry point, the contract tests of its kind, and a run file.

    \b
    Examples:
      rlhf plugins new reward brevity
      rlhf plugins new algorithm my-update --output ~/plugins/my-update
    """
    from ..scaffold import new_plugin

    folder, files = new_plugin(_kind(kind), name, output)
    for path in files:
        echo(f"wrote {folder / path}")
    echo(f"next: pip install -e '{folder}[test]'; pytest {folder}; rlhf train {folder / 'run.yaml'}")
