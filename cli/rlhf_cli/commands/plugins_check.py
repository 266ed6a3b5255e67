"""`rlhf plugins check`: import plugins, and what they build, and say which are broken."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import click

from ..output import print_table

if TYPE_CHECKING:
    from rlhf_core.plugins import PluginRef


class Verdict(NamedTuple):
    """How one plugin does."""

    status: str
    detail: str

    @property
    def is_broken(self) -> bool:
        return self.status == "broken"


@click.command("check")
@click.argument("name", metavar="[NAME | KIND/NAME]", required=False)
def check(name: str | None) -> int:
    """Import every plugin (or those of that name) and what it builds.

    Exits 1 where one is broken. A missing optional dependency is reported and is no failure.

    \b
    Examples:
      rlhf plugins check
      rlhf plugins check ppo
      rlhf plugins check reward/exact-match
    """
    refs = _chosen(name)
    verdicts = [(ref, _verdict(ref)) for ref in refs]
    rows = [[f"{ref.kind}/{ref.name}", f"{ref.distribution} {ref.version}", *verdict] for ref, verdict in verdicts]
    print_table(["plugin", "distribution", "status", "detail"], rows)
    return int(any(verdict.is_broken for _, verdict in verdicts))


def _chosen(name: str | None) -> list[PluginRef]:
    from rlhf_core.did_you_mean import fold, suggestion
    from rlhf_core.errors import PluginError
    from rlhf_core.plugins import as_kind, discover_all

    installed = discover_all()
    if name is None:
        return [ref for by_name in installed.values() for ref in by_name.values()]
    kind_name, slash, last = name.rpartition("/")
    kinds = [as_kind(kind_name)] if slash else list(installed)
    found = [installed[kind][fold(last)] for kind in kinds if fold(last) in installed[kind]]
    if not found:
        known = [ref.name for kind in kinds for ref in installed[kind].values()]
        raise PluginError(f'no plugin "{name}" is installed{suggestion(last, known)}', hint="rlhf plugins list")
    return found


def _verdict(ref: PluginRef) -> Verdict:
    from rlhf_core.components import KINDS
    from rlhf_core.config_resolve import check_options
    from rlhf_core.errors import PluginError
    from rlhf_core.plugins import (
        check_clash,
        import_target,
        install_line,
        load_ref,
        missing_modules,
        resolve_build,
    )

    try:
        check_clash(ref)
        if ref.kind not in KINDS:
            import_target(ref)
            return Verdict("ok", "")
        selected = load_ref(ref)
        check_options(selected)
        missing = missing_modules(selected.component)
        if missing:
            needs = f"needs {', '.join(missing)}: {install_line(selected.component, missing)}"
            return Verdict("not installed", needs)
        resolve_build(selected)
    except PluginError as error:
        return Verdict("broken", error.message)
    return Verdict("ok", selected.component.summary)
