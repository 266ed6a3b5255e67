"""Plugins, found through entry points.

Listing reads the metadata of installed distributions and imports nothing. A plugin is imported when it is
loaded, and what it builds when that is resolved, so a broken one is an error only if it is selected.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, wraps
from importlib import import_module
from importlib.metadata import Distribution, EntryPoint, entry_points
from typing import Any, Literal, get_args

from pydantic import BaseModel

from ..columns import columns_of
from ..components import API_VERSION, KINDS, Component, Kind
from ..errors import PluginError, RlhfError
from ..util.did_you_mean import closest, fold, suggestion
from ..util.error_text import error_text
from .built import check_built
from .functions import class_component, function_build, function_component, load_function_file
from .known import KNOWN
from .moved import moved_hint
from .requirements import check_required, not_installed
from .source import read_options
from .trust import EVERY_FILE, FileTrust, is_file_reference

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
}
"""How errors call one plugin of a kind."""
GROUPS: tuple[str, ...] = tuple(SINGULAR)
"""Kinds of plugins; the entry-point group is `rlhf.` and this."""


@dataclass(frozen=True, slots=True)
class PluginRef:
    """One entry point, not imported."""

    kind: str
    name: str
    distribution: str
    version: str
    target: str
    """`module:attr` that the entry point names."""
    missing: tuple[str, ...]
    """Modules the entry point says it needs (`name = "module:attr [needed]"`) that are not installed."""
    entry_point: EntryPoint
    clashes: tuple[PluginRef, ...] = ()
    """Other entry points of the same kind and (folded) name; selecting the name is then an error."""

    @property
    def label(self) -> str:
        """How errors call it: `algorithm "ppo" (rlhf-ppo 0.1.0)`."""
        return f'{SINGULAR[self.kind]} "{self.name}" ({self.distribution} {self.version})'


@dataclass(frozen=True)
class Selected:
    """A plugin that was imported and fits this core."""

    kind: str
    name: str
    component: Component
    distribution: str
    version: str
    function: Callable[..., Any] | None = None
    """The object given instead of a `Component`: a reward, the class of an environment, or a file's function."""
    unread: tuple[str, ...] | None = None
    """For a file that was read and not run: what its source does not tell. Such a plugin cannot be built."""

    @property
    def label(self) -> str:
        return f'{SINGULAR[self.kind]} "{self.name}" ({self.owner})'

    @property
    def owner(self) -> str:
        """Its distribution and version."""
        return f"{self.distribution} {self.version}"

    def check_built(self, built: object) -> None:
        """Raise `PluginError` where what its `build` returned is not of its kind."""
        check_built(built, self.kind, self.component, label=self.label, name=self.name)


def as_kind(name: str) -> str:
    """`algorithm`, `Algorithms` -> `algorithms`; also `hooks` and `commands`. Raises `PluginError`."""
    folded = fold(name)
    for kind in GROUPS:
        spoken = SINGULAR[kind].replace(" ", "-")
        if folded in (fold(kind), fold(spoken), kind.removesuffix("s")):
            return kind
    raise PluginError(f'no plugin kind "{name}"{suggestion(name, GROUPS)}', hint=f"kinds: {', '.join(GROUPS)}")


def discover_all() -> dict[str, dict[str, PluginRef]]:
    """Every installed plugin: kind -> folded name -> ref. Reads metadata only."""
    return {kind: discover(kind) for kind in GROUPS}


def discover(kind: str) -> dict[str, PluginRef]:
    """Installed plugins of one kind by folded name. Reads metadata only; clashes are noted on the ref.

    Metadata is cached, and read again when a folder of `sys.path` changes.
    """
    return _installed().get(kind, {})


def plugin_versions() -> dict[str, str]:
    """Distribution -> version, of all that have an entry point in a group `rlhf.…`."""
    refs = [ref for by_name in _installed().values() for first in by_name.values() for ref in (first, *first.clashes)]
    return {ref.distribution: ref.version for ref in refs}


def strays(name: str | None = None) -> list[str]:
    """A sentence for each entry point (of that name) in a group nothing reads, as `rlhf.reward` for `rlhf.rewards`."""
    groups = [f"{_PREFIX}{kind}" for kind in GROUPS]
    return [
        f'"{ref.name}" of {ref.distribution} is in the group {_PREFIX}{kind}, '
        f"which nothing reads{suggestion(f'{_PREFIX}{kind}', groups)}"
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
    """Name and version. Cached, because `Distribution` parses its metadata file each time either is read."""
    about = distribution.metadata
    return about["Name"], about["Version"]


@lru_cache(maxsize=1)
def _read(path: tuple[str, ...], modified: tuple[int | None, ...]) -> dict[str, dict[str, PluginRef]]:
    """path, modified: the cache key."""
    found: dict[str, dict[str, list[PluginRef]]] = {}
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
        found.setdefault(ref.kind, {}).setdefault(fold(ref.name), []).append(ref)
    return {kind: dict(sorted(map(_with_clashes, named.items()))) for kind, named in found.items()}


def _with_clashes(named: tuple[str, Sequence[PluginRef]]) -> tuple[str, PluginRef]:
    first, *others = sorted(named[1], key=lambda ref: (ref.distribution, ref.target))
    return named[0], replace(first, clashes=tuple(others))


def find(kind: str, name: str) -> PluginRef:
    """The one installed plugin of that name. Raises `PluginError` on an unknown or doubly given name."""
    refs = discover(kind)
    ref = refs.get(fold(name))
    if ref is None:
        raise _unknown(kind, name, refs)
    check_clash(ref)
    return ref


def check_clash(ref: PluginRef) -> None:
    """Raise `PluginError` naming every distribution where more than one gives this name."""
    if not ref.clashes:
        return
    owners = [f"{each.distribution} {each.version} ({each.target})" for each in (ref, *ref.clashes)]
    raise PluginError(
        f'{SINGULAR[ref.kind]} "{ref.name}" is given by {" and by ".join(owners)}',
        hint=f"uninstall one of them: pip uninstall {ref.clashes[0].distribution}",
    )


def _unknown(kind: str, name: str, refs: Mapping[str, PluginRef]) -> PluginError:
    known = KNOWN.get(kind, {})
    home = next((home for each, home in known.items() if fold(each) == fold(name)), None)
    installed = ", ".join(ref.name for ref in refs.values()) or "none"
    names = [*(ref.name for ref in refs.values()), *known]
    if home is not None:
        hint = f"pip install {home}"
    else:
        near = closest(name, names)
        near_home = known.get(near) if near is not None and fold(near) not in refs else None
        hint = f"pip install {near_home}" if near_home else f"rlhf plugins list; pip install the one that has {name}"
    other = next((each for each in GROUPS if fold(name) in discover(each) or name in KNOWN.get(each, ())), None)
    guess = "" if home is not None else suggestion(name, names)
    if home is None and other is not None:
        guess = f'; "{name}" is one of the {other.replace("_", " ")}'
    hint = "; ".join(strays(name)) or hint
    if kind == "prompts" and name.endswith(".jsonl"):
        hint = f"a file of prompts is {{name: jsonl, path: {name}}}"
    if kind == "rewards" and ":" in name:
        file = f"FILE.py:{name.partition(':')[2]}"
        hint = f"a function given to train(rewards=[…]) has to be given again, or named in its file: {file}"
    return PluginError(f'no {SINGULAR[kind]} "{name}" is installed{guess} (installed: {installed})', hint=hint)


def import_target(ref: PluginRef) -> Any:
    """Import the object that the entry point names. Raises `PluginError` with the plugin's name where that fails."""
    try:
        return ref.entry_point.load()
    except (Exception, SystemExit) as error:  # a stranger's module may raise anything
        raise _broken(ref.label, ref.target, error) from error


def _broken(label: str, target: str, error: BaseException) -> PluginError:
    return PluginError(
        f"cannot import {target}: {error_text(error)}",
        where=label,
        hint=moved_hint(error) or "the plugin is broken: reinstall or remove it, or tell its authors",
    )


FROM_FILES: Mapping[str, str | None] = {
    "rewards": "the rollouts",
    "environments": None,
    "hooks": None,
    "algorithms": "the context",
    "prompts": "the context",
}
"""Kinds that `FILE.py:NAME` can name -> what its function takes by position; None: it is a class."""


def load(kind: Kind | str, name: str, *, check_requires: bool = True, trust: FileTrust = EVERY_FILE) -> Selected:
    """Import the plugin of that name and check that it fits this core.

    A reward may also be `FILE.py:FUNCTION`, an environment `FILE.py:CLASS`, an algorithm or a prompt source a function
    of the context whose keyword-only parameters are its options; the file is run or read as `trust` says.
    Raises `PluginError`: unknown, given twice, broken, made for another plugin API, not to be run, or (with
    `check_requires`) missing a module it needs, or with a version of it that it cannot use.
    """
    if kind not in get_args(Kind):
        raise ValueError(f"load() is for {', '.join(KINDS)}; not {kind!r}")
    if kind in FROM_FILES and is_file_reference(name):
        return _load_file(kind, name, trust)
    selected = load_ref(find(kind, name))
    if check_requires:
        check_required(selected)
    return selected


def _load_file(kind: str, reference: str, trust: FileTrust) -> Selected:
    name = reference.rpartition(":")[2]
    spoken = SINGULAR[kind]
    where = f'{spoken} "{reference}"'
    wanted: Literal["function", "class"] = "class" if FROM_FILES[kind] is None else "function"
    if not trust.runs:
        options = read_options(reference, where=where, kind=wanted, takes=FROM_FILES[kind])
        component = Component(summary=options.summary, config=options.model, build="")
        return Selected(kind, f"{options.path}:{name}", component, options.path.name, "file", unread=options.unread)
    path, found = load_function_file(reference, trust, spoken=spoken, kind=wanted)
    if isinstance(found, type):
        component = class_component(found, where=where)
    else:
        component = function_component(found, where=reference, takes=FROM_FILES[kind])
    return Selected(kind, f"{path}:{name}", component, path.name, "file", found)


def has_options(ref: PluginRef) -> bool:
    """Whether it is more than a module or object of hooks, which is on when it is installed. Imports it."""
    return ref.kind != "hooks" or isinstance(import_target(ref), Component)


def load_ref(ref: PluginRef) -> Selected:
    """Import one found plugin (`load` without the check of what it requires)."""
    loaded = import_target(ref)
    if isinstance(loaded, Component):
        _check_component(loaded, ref)
        return Selected(ref.kind, ref.name, loaded, ref.distribution, ref.version)
    if ref.kind == "rewards" and callable(loaded) and not isinstance(loaded, type):
        component = function_component(loaded, where=ref.label, build=ref.target)
        return Selected(ref.kind, ref.name, component, ref.distribution, ref.version, loaded)
    if ref.kind == "environments" and isinstance(loaded, type):
        component = class_component(loaded, where=ref.label, build=ref.target)
        return Selected(ref.kind, ref.name, component, ref.distribution, ref.version, loaded)
    if ref.kind == "hooks":
        raise PluginError(
            "is on when it is installed, and has no options",
            where=ref.label,
            hint=f"remove it, or turn it off with hooks: {{disable: [{ref.name}]}}",
        )
    others = {"rewards": " or a function", "environments": " or a class"}
    wanted = "a rlhf_core.Component" + others.get(ref.kind, "")
    raise PluginError(f"{ref.target} is a {type(loaded).__name__}, not {wanted}", where=ref.label)


def _check_component(component: Component, ref: PluginRef) -> None:
    if component.api_version != API_VERSION:
        newer = component.api_version > API_VERSION
        raise PluginError(
            f"made for plugin API {component.api_version}, this rlhf-core has {API_VERSION}",
            where=ref.label,
            hint="pip install --upgrade " + ("rlhf-core" if newer else ref.distribution),
        )
    if not (isinstance(component.config, type) and issubclass(component.config, BaseModel)):
        raise PluginError(f"its config is {component.config!r}, not a pydantic model", where=ref.label)


def resolve_build(selected: Selected) -> Callable[..., Any]:
    """The callable `build(config, context)`; imports the module that holds it. Raises `PluginError`.

    What `build` raises names the plugin: an `RlhfError` keeps its kind, anything else becomes a `PluginError`.
    """
    build = find_build(selected)

    @wraps(build)
    def named(config: BaseModel, context: object) -> Any:
        try:
            built = build(config, context)
        except RlhfError as error:
            error.raised_by(selected.label)
            raise
        except Exception as error:  # a stranger's build may raise anything
            raise PluginError(
                f"{selected.component.build or selected.name} raised {error_text(error)}",
                where=selected.label,
                hint="if its options are right, the plugin is broken: tell its authors",
            ) from error
        selected.check_built(built)
        if selected.kind == "engines":  # the config declares what core reads of the engine
            declared = {"request_options": getattr(config, "request_options", {}), "columns": columns_of(type(config))}
            for name in (name for name, value in declared.items() if getattr(built, name, {}) != value):
                setattr(built, name, declared[name])
        return built

    return named


def find_build(selected: Selected) -> Callable[..., Any]:
    """`resolve_build` for who names the plugin himself: what it raises comes as it is."""
    if selected.function is not None:
        return function_build(selected.function, takes_context=selected.kind in ("algorithms", "prompts"))
    if selected.unread is not None:
        raise PluginError(f"{selected.name} was read and not run, so it cannot be built", where=selected.label)
    target = selected.component.build
    module_name, _, attribute = target.partition(":")
    try:
        found: Any = import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:  # a stranger's module may raise anything
        raise _broken(selected.label, target, error) from error
    if not callable(found):
        raise PluginError(
            f"its build target {target} is a {type(found).__name__}, not a callable", where=selected.label
        )
    return found  # type: ignore[no-any-return]
