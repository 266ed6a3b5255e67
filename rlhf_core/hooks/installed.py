"""Third-party hook plugins: entry points of the group `rlhf.hooks`, on when installed."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points

from ..errors import PluginError
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
            logger.info("hook plugin %r (%s) is disabled", entry.name, _distribution(entry))
            continue
        try:
            plugin = entry.load()
        except Exception as error:
            _report(entry, f"cannot be imported: {type(error).__name__}: {error}")
            continue
        try:
            loaded.append(relay.register(plugin, name=entry.name, distribution=_distribution(entry)))
        except PluginError as error:
            _report(entry, str(error))
    return loaded


def fold(name: str) -> str:
    """Names compare with case, `-` and `_` folded."""
    return name.lower().replace("_", "-")


def _installed() -> dict[str, EntryPoint]:
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=GROUP):
        other = found.setdefault(fold(entry.name), entry)
        if _distribution(other) != _distribution(entry):
            raise PluginError(
                f"{_distribution(other)} and {_distribution(entry)} both give it",
                where=f"hook plugin {entry.name!r}",
                hint="uninstall one of them",
            )
    return found


def _distribution(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else entry.value


def _report(entry: EntryPoint, what: str) -> None:
    logger.warning(
        "hook plugin %r (%s) is left out: %s\n  -> repair or uninstall it, or: hooks: {disable: [%s]}",
        entry.name,
        _distribution(entry),
        what,
        entry.name,
    )
