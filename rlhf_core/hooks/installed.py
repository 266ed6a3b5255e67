"""Hook plugins: those that are on when they are installed, and those with options that a run file lists."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..components import Component, HookContext
from ..config.resolved import Configured
from ..errors import PluginError
from ..plugins.discovery import check_clash, discover, import_target, resolve_build
from ..util.did_you_mean import fold
from .relay import HookRelay

logger = logging.getLogger("rlhf")


def load_hook_plugins(relay: HookRelay, disable: Iterable[str] = ()) -> list[str]:
    """Import and register every installed hook plugin but those named in `disable` (`hooks: {disable: [name]}`).

    A plugin that cannot be imported or registered is logged by name and skipped; the run continues without it. A
    `Component` is left to `register_listed`. Returns the names that were registered.

    Raises:
        PluginError: two distributions give one name.
    """
    disabled = {fold(name) for name in disable}
    loaded = []
    for name, ref in discover("hooks").items():
        check_clash(ref)
        owner = f"{ref.distribution} {ref.version}"
        if name in disabled:
            logger.info("hook plugin %r (%s) is disabled", ref.name, owner)
            continue
        try:
            plugin = import_target(ref)
            if not isinstance(plugin, Component):
                loaded.append(relay.register(plugin, name=ref.name, distribution=owner))
        except PluginError as error:
            mend = f"{error.hint or 'repair or uninstall it'}; or: hooks: {{disable: [{ref.name}]}}"
            logger.warning("hook plugin %r (%s) is left out: %s\n  -> %s", ref.name, owner, error.message, mend)
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
