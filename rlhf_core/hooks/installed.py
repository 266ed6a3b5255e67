"""Hook plugins: those that are on when they are installed, and those with options that a run file lists."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..components import Component, HookContext
from ..config.selected import Configured
from ..errors import PluginError
from ..plugins.discovery import resolve_build
from ..util.did_you_mean import fold
from ..util.entry_points import InstalledEntry, installed_entries
from .relay import HookRelay

logger = logging.getLogger("rlhf")

GROUP = "rlhf.hooks"


def load_hook_plugins(relay: HookRelay, disable: Iterable[str] = ()) -> list[str]:
    """Import and register every installed hook plugin but those named in `disable` (`hooks: {disable: [name]}`).

    A plugin that cannot be imported or registered is logged by name and skipped; the run continues without it. A
    `Component` is left to `register_listed`. Returns the names that were registered.

    Raises:
        PluginError: two distributions give one name.
    """
    disabled = {fold(name) for name in disable}
    loaded = []
    for name, entry in _installed().items():
        if name in disabled:
            logger.info("hook plugin %r (%s) is disabled", entry.entry_point.name, _label(entry))
            continue
        try:
            plugin = entry.entry_point.load()
        except Exception as error:
            _report(entry, f"cannot be imported: {type(error).__name__}: {error}")
            continue
        if isinstance(plugin, Component):
            continue
        try:
            loaded.append(relay.register(plugin, name=entry.entry_point.name, distribution=_label(entry)))
        except PluginError as error:
            _report(entry, str(error))
    return loaded


def register_listed(
    relay: HookRelay, listed: Sequence[Configured], run_folder: Path, disable: Iterable[str] = ()
) -> list[str]:
    """Build and register the hook plugins with options that a run lists, but those named in `disable`.

    Returns their names. Raises `PluginError` for one that cannot be built, or has no hook.
    """
    disabled = {fold(name) for name in disable}
    context = HookContext(run_folder=run_folder)
    return [
        relay.register(
            resolve_build(each)(each.config, context),
            name=each.name,
            distribution=f"{each.distribution} {each.version}",
        )
        for each in listed
        if fold(each.name) not in disabled
    ]


def _installed() -> dict[str, InstalledEntry]:
    found: dict[str, InstalledEntry] = {}
    for entry in installed_entries(GROUP):
        name = entry.entry_point.name
        other = found.setdefault(fold(name), entry)
        if _label(other) != _label(entry):
            raise PluginError(
                f"{_label(other)} and {_label(entry)} both give it",
                where=f"hook plugin {name!r}",
                hint="uninstall one of them",
            )
    return found


def _label(entry: InstalledEntry) -> str:
    return f"{entry.distribution} {entry.version}"


def _report(entry: InstalledEntry, what: str) -> None:
    logger.warning(
        "hook plugin %r (%s) is left out: %s\n  -> repair or uninstall it, or: hooks: {disable: [%s]}",
        entry.entry_point.name,
        _label(entry),
        what,
        entry.entry_point.name,
    )
