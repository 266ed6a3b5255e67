"""Third-party hook plugins: entry points of the group `rlhf.hooks`, on when installed."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from ..errors import PluginError
from ..util.did_you_mean import fold
from ..util.entry_points import InstalledEntry, installed_entries
from .relay import HookRelay

logger = logging.getLogger("rlhf")

GROUP = "rlhf.hooks"


def load_hook_plugins(relay: HookRelay, disable: Iterable[str] = ()) -> list[str]:
    """Import and register every installed hook plugin but those named in `disable` (`hooks: {disable: [name]}`).

    A plugin that cannot be imported or registered is reported in the log by name and left out; the run goes
    on without it. Returns the names that were registered.

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
        try:
            loaded.append(relay.register(plugin, name=entry.entry_point.name, distribution=_label(entry)))
        except PluginError as error:
            _report(entry, str(error))
    return loaded


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
