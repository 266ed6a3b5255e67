"""Hook plugins: those that are active once installed, and those with options that a run file lists."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from ..components import Component, HookContext
from ..config.resolved import Configured, ResolvedRun
from ..errors import PluginError
from ..plugins.discovery import check_clash, discover, import_target
from ..plugins.selected import load
from ..util.did_you_mean import fold
from ..util.redact import redact_mapping
from .relay import HookRelay

logger = logging.getLogger("rlhf")


def load_hook_plugins(relay: HookRelay, disable: Iterable[str] = ()) -> None:
    """Import and register every installed hook plugin except those in `disable` (`hooks: {disable: [name]}`).

    A plugin that cannot be imported or registered is logged and skipped. `register_listed` handles each `Component`.

    Raises:
        PluginError: two distributions provide the same name.
    """
    disabled = {fold(name) for name in disable}
    for name, ref in discover("hooks").items():
        check_clash(ref)
        owner = f"{ref.distribution} {ref.version}"
        if name in disabled:
            logger.info("hook plugin %r (%s) is disabled", ref.name, owner)
            continue
        try:
            plugin = import_target(ref)
            if not isinstance(plugin, Component):
                relay.register(plugin, name=ref.name, distribution=owner)
        except PluginError as error:
            fix = f"{error.hint or 'repair or uninstall it'}, or turn it off with hooks: {{disable: [{ref.name}]}}"
            logger.warning("hook plugin %r (%s) is skipped: %s\n  -> %s", ref.name, owner, error.message, fix)


def register_listed(relay: HookRelay, resolved: ResolvedRun, run_folder: Path) -> None:
    """Build and register the hook plugins with options of a run: those that are always on, and those that it lists.

    Plugins in `hooks.disable` are left out.

    Raises:
        PluginError: a plugin cannot be built, does not define a hook, or is listed although it is always on.
    """
    for each in resolved.hooks:
        if each.component.always_on:
            hint = f"remove it, or turn it off with disable: [{each.name}]"
            raise PluginError("is on in every run", where=f"hooks.{each.name}", hint=hint)
    disabled = {fold(name) for name in resolved.run.hooks.disable}
    context = HookContext(run_folder, redact_mapping(resolved.to_mapping()))
    for each in (*_always_on(resolved, disabled), *resolved.hooks):
        if fold(each.name) not in disabled:
            relay.register(each.build(each.config, context), name=each.name, distribution=each.owner)


def register_hooks(relay: HookRelay, resolved: ResolvedRun, run_folder: Path) -> None:
    """Register every hook plugin of a run, with options or without. Raises the errors of the two functions above.

    Args:
        relay: the relay of the run.
        resolved: the run.
        run_folder: passed to the plugins.
    """
    load_hook_plugins(relay, resolved.run.hooks.disable)
    register_listed(relay, resolved, run_folder)


def _always_on(resolved: ResolvedRun, disabled: Collection[str]) -> Iterator[Configured]:
    """Yield the installed hook plugins with options that are active in every run, with their section's options."""
    for name, ref in discover("hooks").items():
        if name in disabled:
            continue
        try:
            plugin = import_target(ref)
        except PluginError:  # `load_hook_plugins` has reported it
            continue
        if isinstance(plugin, Component) and plugin.always_on:
            yield Configured.of(load("hooks", name), resolved.section(ref.name) or plugin.config())
