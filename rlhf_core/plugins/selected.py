"""A plugin that was imported and fits this core: its component, and how to build it.

The build function is imported when it is called, so that a broken plugin is an error only if it is selected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pkgutil import resolve_name
from typing import Any

from pydantic import BaseModel

from ..columns import columns_of
from ..components import API_VERSION, KINDS, Component, Kind
from ..errors import PluginError
from .discovery import SINGULAR, PluginRef, broken_import, find, import_target
from .errors_of import errors_of
from .functions import PLAIN, UnreadOptions, component_of, load_function_file
from .requirements import unmet
from .trust import EVERY_FILE, FileTrust, is_file_reference, split_reference

_BUILD_TYPES: Mapping[str, str] = {
    "strategies": "rlhf_core.strategy:Strategy",
    "engines": "rlhf_core.protocols:RolloutEngine",
    "loggers": "rlhf_core.protocols:Logger",
    "models": "rlhf_core.models.kinds:ModelKind",
    "optimizers": "torch.optim:Optimizer",
}
"""Kind -> class of what its `build` returns. Environments are checked when played, hooks when registered."""
_LEARNER = {"rollouts": "rlhf_core.algorithm:RolloutAlgorithm", "dataset": "rlhf_core.algorithm:DatasetAlgorithm"}
_CALL_ARGUMENTS = {"rewards": "rollouts", "schedules": "the index of an update"}


@dataclass(frozen=True)
class SelectedPlugin:
    """A plugin that was imported and fits this core."""

    kind: str
    name: str
    component: Component
    distribution: str
    version: str
    function: Callable[..., Any] | None = None
    """Plain function or class provided instead of a `Component`."""

    @property
    def is_unread(self) -> bool:
        """Whether it is in a file that was not executed, so that its options are unknown and it cannot be built."""
        return self.component.config is UnreadOptions

    @property
    def label(self) -> str:
        return f'{SINGULAR[self.kind]} "{self.name}" ({self.owner})'

    @property
    def owner(self) -> str:
        """Its distribution and version."""
        return f"{self.distribution} {self.version}"

    def build(self, config: BaseModel, context: object) -> Any:
        """Build the component from its checked options and the context of its kind.

        Errors name the plugin: an `RlhfError` keeps its type, any other becomes a `PluginError`, as does a result that
        is not of the plugin's kind.
        """
        build = self.import_build()
        with errors_of(self.label, self.component.build or self.name, kind=PluginError):
            built = build(config, context)
        if (problem := self.misses(built)) is not None:
            raise PluginError(
                f"its build returned a {type(built).__name__}, which {problem}",
                where=self.label,
                hint=f"the plugin is broken: report it to its authors, and see rlhf plugins check {self.name}",
            )
        if self.kind == "engines":  # the config declares the attributes that core reads from the engine
            declared = {"request_options": getattr(config, "request_options", {}), "columns": columns_of(type(config))}
            for name in (name for name, value in declared.items() if getattr(built, name, {}) != value):
                setattr(built, name, declared[name])
        return built

    def import_build(self) -> Callable[[BaseModel, object], Any]:
        """Import the function that `build` calls.

        Raises `PluginError`, also if a required module is missing or its version is not supported.
        """
        if self.function is not None:
            return partial(_build_plain, self.function, self.kind, tuple(self.component.config.model_fields))
        if self.is_unread:
            raise PluginError(f"{self.name} was not executed, so it cannot be built", where=self.label)
        if (lack := unmet(self.component, self.distribution)) is not None:
            raise PluginError(lack[0], where=self.label, hint=lack[1])
        target = self.component.build
        try:
            build: Any = resolve_name(target)
        except (Exception, SystemExit) as error:  # a third-party module may raise anything
            raise broken_import(self.label, target, error) from error
        if not callable(build):
            raise PluginError(
                f"its build target {target} is a {type(build).__name__}, not a callable", where=self.label
            )
        return build  # type: ignore[no-any-return]

    def recipe(self, config: BaseModel, context: object) -> Recipe:
        """Return how another process can build it. `context` must be picklable."""
        # Only the plugin's own options, without those that core or a section adds.
        own_options = config.model_dump(include=set(self.component.config.model_fields))
        return Recipe(self.kind, self.name, own_options, context)

    def misses(self, built: object) -> str | None:
        """Return why a result of `build` is not of its kind, as the end of a sentence, or None if it is."""
        expected = _LEARNER[self.component.feeds] if self.kind == "algorithms" else _BUILD_TYPES.get(self.kind)
        if expected is not None:
            return None if isinstance(built, resolve_name(expected)) else f"is not a {expected.replace(':', '.')}"
        if self.kind in _CALL_ARGUMENTS:
            return None if callable(built) else f"cannot be called with {_CALL_ARGUMENTS[self.kind]}"
        if self.kind == "transports":
            return None if callable(getattr(built, "run", None)) else "does not have run(request)"
        if self.kind != "prompts" or hasattr(built, "__getitem__") or hasattr(built, "make_stream"):
            return None
        if isinstance(built, Iterator):
            return "can be read only once: return a list, or an object that can be iterated repeatedly"
        return None if isinstance(built, Iterable) else "is not a PromptSource"  # a mixture may contain a stream


def _build_plain(target: Callable[..., Any], kind: str, keys: Sequence[str], config: BaseModel, context: object) -> Any:
    """Return a function with its options, or its result for the context, or an instance of a class."""
    with_options = partial(target, **{name: getattr(config, name) for name in keys})
    if PLAIN[kind].takes == "the context":
        return with_options(context)
    return with_options() if PLAIN[kind].is_class else with_options


@dataclass(frozen=True)
class Recipe:
    """Finds an installed plugin (or `FILE.py:NAME`) again in any process that unpickles this, and builds it."""

    kind: str
    name: str
    options: Mapping[str, Any]
    context: object

    def builder(self) -> Callable[[], Any]:
        """Import the plugin and check its options. Returns a function that builds it. Raises `PluginError`."""
        selected = load(self.kind, self.name)
        selected.import_build()
        return partial(selected.build, selected.component.config.model_validate(dict(self.options)), self.context)

    def __call__(self) -> Any:
        """Build the component."""
        return self.builder()()


def load(kind: Kind | str, name: str, *, check_requires: bool = True, trust: FileTrust = EVERY_FILE) -> SelectedPlugin:
    """Import the plugin of that name and check that it fits this core.

    Args:
        kind: such as `rewards`.
        name: name of an installed plugin, or `FILE.py:NAME` of a plain function or class (see `Plain`).
        check_requires: whether a missing required module is an error.
        trust: which files may be executed. If none may, the file must still exist.

    Returns:
        The plugin, not built.

    Raises:
        PluginError: it is unknown, provided twice, broken, made for another plugin API, or not trusted.
    """
    if kind in PLAIN and is_file_reference(name):
        return _load_file(kind, name, trust)
    selected = load_ref(find(kind, name))
    if check_requires and (lack := unmet(selected.component)) is not None:
        raise PluginError(lack[0], where=selected.label, hint=lack[1])
    return selected


def _load_file(kind: str, reference: str, trust: FileTrust) -> SelectedPlugin:
    """Run the file and return its function or class as a plugin. If no file is trusted, do not run it."""
    where = f'{SINGULAR[kind]} "{reference}"'
    if not trust.runs:
        path, name = split_reference(reference, where)
        return SelectedPlugin(kind, f"{path}:{name}", Component("", UnreadOptions), path.name, "file")
    path, target = load_function_file(reference, trust, where=where, is_class=PLAIN[kind].is_class)
    name = f"{path}:{reference.rpartition(':')[2]}"
    return SelectedPlugin(kind, name, component_of(target, kind, where=where), path.name, "file", target)


def has_options(ref: PluginRef) -> bool:
    """Whether it is more than a module or object of hooks, which is active as soon as it is installed. Imports it."""
    return ref.kind != "hooks" or isinstance(import_target(ref), Component)


def load_ref(ref: PluginRef) -> SelectedPlugin:
    """Import a discovered plugin (`load` without the check of required modules)."""
    target = import_target(ref)
    if isinstance(target, Component) and ref.kind in KINDS:
        _check_component(target, ref)
        return SelectedPlugin(ref.kind, ref.name, target, ref.distribution, ref.version)
    if ref.kind == "hooks":
        raise PluginError(
            "is always on once it is installed, and does not have options",
            where=ref.label,
            hint=f"remove it, or turn it off with hooks: {{disable: [{ref.name}]}}",
        )
    plain = PLAIN.get(ref.kind)
    if plain is None or not plain.fits(target):
        expected = ["a rlhf_core.Component"] * (ref.kind in KINDS) + ([f"a {plain.noun}"] if plain is not None else [])
        raise PluginError(f"{ref.target} is a {type(target).__name__}, not {' or '.join(expected)}", where=ref.label)
    component = component_of(target, ref.kind, where=ref.label, build=ref.target)
    return SelectedPlugin(ref.kind, ref.name, component, ref.distribution, ref.version, target)


def _check_component(component: Component, ref: PluginRef) -> None:
    """Raise `PluginError` for a component of another plugin API or without a pydantic config."""
    if component.api_version != API_VERSION:
        newer = component.api_version > API_VERSION
        raise PluginError(
            f"made for plugin API {component.api_version}, this rlhf-core has {API_VERSION}",
            where=ref.label,
            hint="pip install --upgrade " + ("rlhf-core" if newer else ref.distribution),
        )
    if not (isinstance(component.config, type) and issubclass(component.config, BaseModel)):
        raise PluginError(f"its config is {component.config!r}, not a pydantic model", where=ref.label)
