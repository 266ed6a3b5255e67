"""`rlhf plugins check`: check plugins in another process, and report the broken ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ..output import echo, print_table

if TYPE_CHECKING:
    from rlhf_core.plugins.discovery import PluginRef


@click.command("check", short_help="Try plugins and say which are broken.")
@click.argument("name", metavar="[NAME | KIND/NAME]", required=False)
def check(name: str | None) -> int:
    """Import every plugin and check what it says about itself, in a process of their own, without a GPU.

    Those of NAME also run the contract suite of their kind with their default options: one that needs more than these
    is "not run". Exits 1 where one is broken. A missing optional dependency is reported but is not a failure.

    \b
    Examples:
      rlhf plugins check
      rlhf plugins check ppo
      rlhf plugins check reward/exact-match
    """
    from rlhf_core.errors import PluginError
    from rlhf_core.plugins.discovery import strays

    try:
        from rlhf_testing.probe import probe
    except ModuleNotFoundError as missing:
        raise PluginError("`rlhf plugins check` needs rlhf-testing", hint="pip install rlhf-core[testing]") from missing

    refs = _chosen(name)
    verdicts = probe(refs, whole=name is not None)
    rows = [
        [f"{ref.kind}/{ref.name}", f"{ref.distribution} {ref.version}", *verdict]
        for ref, verdict in zip(refs, verdicts, strict=True)
    ]
    print_table(["plugin", "distribution", "status", "detail"], rows)
    unread = [] if name is not None else strays()
    for told in unread:
        echo(f"error: {told}", err=True)
    return int(bool(unread) or any(verdict.status == "broken" for verdict in verdicts))


def _chosen(name: str | None) -> list[PluginRef]:
    from rlhf_core.errors import PluginError
    from rlhf_core.plugins.discovery import as_kind, discover_all, strays
    from rlhf_core.util.did_you_mean import fold, suggestion

    installed = discover_all()
    if name is None:
        return [ref for by_name in installed.values() for ref in by_name.values()]
    kind_name, slash, last = name.rpartition("/")
    kinds = [as_kind(kind_name)] if slash else list(installed)
    found = [installed[kind][fold(last)] for kind in kinds if fold(last) in installed[kind]]
    if not found:
        known = [ref.name for kind in kinds for ref in installed[kind].values()]
        hint = "; ".join(strays(last)) or "rlhf plugins list"
        raise PluginError(f'no plugin "{name}" is installed{suggestion(last, known)}', hint=hint)
    return found
