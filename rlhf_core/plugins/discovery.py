"""Finds plugins through entry points. Listing reads the metadata of installed distributions and imports nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.metadata import Distribution, EntryPoint, entry_points
from typing import Any

from ..errors import PluginError
from ..util.did_you_mean import closest, fold, suggestion
from ..util.error_text import error_text
from .names import KNOWN, moved_hint
from .requirements import not_installed

_PREFIX = "rlhf."
SINGULAR = {
    "algorithms": "algorithm",
    "strategies": "strategy",
    "rewards": "reward",
    "transports": "transport",
    "engines": "engine",
    "prompts": "prompt source",
    "environments": "environment",
    "hooks": "hook plugin",
    "loggers": "logger",
    "sections": "section",
    "optimizers": "optimizer",
    "schedules": "schedule",
    "models": "kind of model",
    "advantages": "advantage estimator",
    "policy_losses": "policy loss",
    "reward_callers": "reward caller",
    "endpoints": "endpoint server",
    "commands": "command",
    "quickstarts": "quickstart",
    "kl_estimators": "KL estimator",
}
"""Kind -> word for one of its plugins in messages."""
GROUPS = tuple(kind for kind in SINGULAR if kind != "kl_estimators")
"""Kinds of plugins. The entry-point group of a kind is `rlhf.<kind>`. KL estimators come only from files."""


@dataclass(frozen=True, slots=True)
class PluginRef:
    """An entry point, not imported."""

    kind: str
    name: str
    distribution: str
    version: str
    target: str
    """`module:attr` of the entry point."""
    missing: tuple[str, ...]
    """Modules that are not installed, of those that the entry point requires (`name = "module:attr [needed]"`)."""
    entry_point: EntryPoint
    clashes: tuple[PluginRef, ...] = ()
    """Other entry points of the same kind and (folded) name. If there are any, selecting the name is an error."""

    @property
    def label(self) -> str:
        """Name in messages: `algorithm "ppo" (rlhf-ppo 0.1.0)`."""
        return f'{SINGULAR[self.kind]} "{self.name}" ({self.distribution} {self.version})'


def discover(kind: str) -> dict[str, PluginRef]:
    """Return the installed plugins of a kind by folded name. Reads metadata only. A ref lists its clashes.

    Metadata is cached, and read again when a folder in `sys.path` changes.
    """
    return _installed().get(kind, {})


def plugin_versions() -> dict[str, str]:
    """Return distribution -> version for all that have an entry point in a group `rlhf.…`."""
    refs = [ref for by_name in _installed().values() for first in by_name.values() for ref in (first, *first.clashes)]
    return {ref.distribution: ref.version for ref in refs}


def unread_entry_points(name: str | None = None) -> list[str]:
    """Return a sentence for each entry point (of that name) in an unknown group, such as a misspelled `rlhf.reward`."""
    groups = [f"{_PREFIX}{kind}" for kind in GROUPS]
    return [
        f'"{ref.name}" of {ref.distribution} is in the group {_PREFIX}{kind}, '
        f"which is unknown{suggestion(f'{_PREFIX}{kind}', groups)}"
        for kind, by_name in sorted(_installed().items())
        if kind not in GROUPS
        for first in by_name.values()
        for ref in (first, *first.clashes)
        if name is None or fold(ref.name) == fold(name)
    ]


def _installed() -> dict[str, dict[str, PluginRef]]:
    return _read(tuple(sys.path), tuple(map(_modified, sys.path)))


def _modified(folder: str) -> int | None:
    try:
        return os.stat(folder or os.curdir).st_mtime_ns
    except OSError:
        return None


@lru_cache(maxsize=512)
def _name_and_version(distribution: Distribution) -> tuple[str, str]:
    """Return name and version. Cached, because `Distribution` parses its metadata file each time either is read."""
    about = distribution.metadata
    return about["Name"], about["Version"]


@lru_cache(maxsize=4)
def _read(path: tuple[str, ...], modified: tuple[int | None, ...]) -> dict[str, dict[str, PluginRef]]:
    """Read all entry points. `path` and `modified` are only the cache key."""
    refs: dict[str, dict[str, list[PluginRef]]] = {}
    installed = entry_points()
    groups = [group for group in installed.groups if group.startswith(_PREFIX)]
    for entry in (entry for group in groups for entry in installed.select(group=group)):
        distribution, version = _name_and_version(entry.dist) if entry.dist else ("unknown distribution", "?")
        ref = PluginRef(
            kind=entry.group.removeprefix(_PREFIX),
            name=entry.name,
            distribution=distribution,
            version=version,
            target=f"{entry.module}:{entry.attr}" if entry.attr else entry.module,
            missing=not_installed([extra.replace("-", "_") for extra in entry.extras]),
            entry_point=entry,
        )
        refs.setdefault(ref.kind, {}).setdefault(fold(ref.name), []).append(ref)
    return {kind: dict(sorted(map(_with_clashes, named.items()))) for kind, named in refs.items()}


def _with_clashes(named: tuple[str, Sequence[PluginRef]]) -> tuple[str, PluginRef]:
    first, *others = sorted(named[1], key=lambda ref: (ref.distribution, ref.target))
    return named[0], replace(first, clashes=tuple(others))


def find(kind: str, name: str) -> PluginRef:
    """Return the installed plugin of that name. Raises `PluginError` if it is unknown or provided more than once."""
    refs = discover(kind)
    ref = refs.get(fold(name))
    if ref is None:
        raise _unknown(kind, name, refs)
    check_clash(ref)
    return ref


def check_clash(ref: PluginRef) -> None:
    """Raise `PluginError` that names every distribution if more than one provides this name."""
    if not ref.clashes:
        return
    owners = [f"{each.distribution} {each.version} ({each.target})" for each in (ref, *ref.clashes)]
    raise PluginError(
        f'{SINGULAR[ref.kind]} "{ref.name}" is provided by {" and by ".join(owners)}',
        hint=f"uninstall one of them: pip uninstall {ref.clashes[0].distribution}",
    )


def _unknown(kind: str, name: str, refs: Mapping[str, PluginRef]) -> PluginError:
    """Return the error for a name that is not installed, with the most helpful hint."""
    known = KNOWN.get(kind, {})
    home = next((home for each, home in known.items() if fold(each) == fold(name)), None)
    installed = ", ".join(ref.name for ref in refs.values()) or "none"
    names = [*(ref.name for ref in refs.values()), *known]
    if home is not None:
        hint = f"pip install {home}"
    else:
        near = closest(name, names)
        near_home = known.get(near) if near is not None and fold(near) not in refs else None
        hint = f"pip install {near_home}" if near_home else f"rlhf plugins list, or pip install the one with {name}"
    other = next((each for each in GROUPS if fold(name) in discover(each) or name in KNOWN.get(each, ())), None)
    guess = "" if home is not None else suggestion(name, names)
    if home is None and other is not None:
        guess = f', but "{name}" is one of the {other.replace("_", " ")}'
    hint = "; ".join(unread_entry_points(name)) or hint
    if kind == "prompts" and name.endswith(".jsonl"):
        hint = f"a file of prompts is {{name: jsonl, path: {name}}}"
    if kind == "rewards" and ":" in name:
        file = f"FILE.py:{name.partition(':')[2]}"
        hint = f"pass the function to train(rewards=[…]) again, or name it in its file: {file}"
    return PluginError(f'no {SINGULAR[kind]} "{name}" is installed{guess} (installed: {installed})', hint=hint)


def import_target(ref: PluginRef) -> Any:
    """Import the object that the entry point names. Raises `PluginError` with the plugin's name if that fails."""
    try:
        return ref.entry_point.load()
    except (Exception, SystemExit) as error:  # a third-party module may raise anything
        raise broken_import(ref.label, ref.target, error) from error


def broken_import(label: str, target: str, error: BaseException) -> PluginError:
    """Return the error for a plugin whose module, or the name in it, cannot be imported."""
    return PluginError(
        f"cannot import {target}: {error_text(error)}",
        where=label,
        hint=moved_hint(error) or "the plugin is broken: reinstall or remove it, or report it to its authors",
    )
