"""A plugin that was imported and fits this core: its component, and what that builds.

What it builds is imported when it is built, so that a broken plugin is an error only if it is selected.
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

_BUILT: Mapping[str, str] = {
    "strategies": "rlhf_core.strategy:Strategy",
    "engines": "rlhf_core.protocols:RolloutEngine",
    "loggers": "rlhf_core.protocols:Logger",
    "models": "rlhf_core.models.kinds:ModelKind",
    "optimizers": "torch.optim:Optimizer",
}
"""Kind -> class of what its `build` returns. An environment is looked at when it is played, a hook when registered."""
_FED = {"rollouts": "rlhf_core.algorithm:RolloutAlgorithm", "dataset": "rlhf_core.algorithm:DatasetAlgorithm"}
_CALLED = {"rewards": "rollouts", "schedules": "the index of an update"}


@dataclass(frozen=True)
class SelectedPlugin:
    """A plugin that was imported and fits this core."""

    kind: str
    name: str
    component: Component
    distribution: str
    version: str
    function: Callable[..., Any] | None = None
    """The plain function or class given instead of a `Component`."""

    @property
    def is_unread(self) -> bool:
        """Whether it is of a file that was not run: its options are not known, and it cannot be built."""
        return self.component.config is UnreadOptions

    @property
    def label(self) -> str:
        return f'{SINGULAR[self.kind]} "{self.name}" ({self.owner})'

    @property
    def owner(self) -> str:
        """Its distribution and version."""
        return f"{self.distribution} {self.version}"

    def build(self, config: BaseModel, context: object) -> Any:
        """What the component builds of its checked options and the context of its kind.

        What it raises names the plugin: an `RlhfError` keeps its kind, anything else becomes a `PluginError`, as does
        a result that is not of the plugin's kind.
        """
        build = self.import_build()
        with errors_of(self.label, self.component.build or self.name, kind=PluginError):
            built = build(config, context)
        if (wanted := self.misses(built)) is not None:
            raise PluginError(
                f"its build returned a {type(built).__name__}, which {wanted}",
                where=self.label,
                hint=f"the plugin is broken: tell its authors; rlhf plugins check {self.name}",
            )
        if self.kind == "engines":  # the config declares what core reads of the engine
            declared = {"request_options": getattr(config, "request_options", {}), "columns": columns_of(type(config))}
            for name in (name for name, value in declared.items() if getattr(built, name, {}) != value):
                setattr(built, name, declared[name])
        return built

    def import_build(self) -> Callable[[BaseModel, object], Any]:
        """Import what `build` calls. Raises `PluginError`, also for a required module in a version it cannot use."""
        if self.function is not None:
            return partial(_build_plain, self.function, self.kind, tuple(self.component.config.model_fields))
        if self.is_unread:
            raise PluginError(f"{self.name} was not run, so it cannot be built", where=self.label)
        if (lack := unmet(self.component, self.distribution)) is not None:
            raise PluginError(lack[0], where=self.label, hint=lack[1])
        target = self.component.build
        try:
            found: Any = resolve_name(target)
        except (Exception, SystemExit) as error:  # a stranger's module may raise anything
            raise broken_import(self.label, target, error) from error
        if not callable(found):
            raise PluginError(
                f"its build target {target} is a {type(found).__name__}, not a callable", where=self.label
            )
        return found  # type: ignore[no-any-return]

    def recipe(self, config: BaseModel, context: object) -> Recipe:
        """How another process builds it; `context` is picklable."""
        # Of its options, those that are its own, without the ones that stand beside them.
        own_options = config.model_dump(include=set(self.component.config.model_fields))
        return Recipe(self.kind, self.name, own_options, context)

    def misses(self, built: object) -> str | None:
        """What keeps a result of `build` from being of its kind, as the end of a sentence."""
        wanted = _FED[self.component.feeds] if self.kind == "algorithms" else _BUILT.get(self.kind)
        if wanted is not None:
            return None if isinstance(built, resolve_name(wanted)) else f"is no {wanted.replace(':', '.')}"
        if self.kind in _CALLED:
            return None if callable(built) else f"cannot be called with {_CALLED[self.kind]}"
        if self.kind == "transports":
            return None if callable(getattr(built, "run", None)) else "has no run(request)"
        if self.kind != "prompts" or hasattr(built, "__getitem__") or hasattr(built, "make_stream"):
            return None
        if isinstance(built, Iterator):
            return "can be read only once: return a list, or an object that begins anew"
        return None if isinstance(built, Iterable) else "is no PromptSource"  # a stream may be a source of a mixture


def _build_plain(found: Callable[..., Any], kind: str, own: Sequence[str], config: BaseModel, context: object) -> Any:
    """A function with its own options, or what it makes of the context; an instance of a class."""
    with_options = partial(found, **{name: getattr(config, name) for name in own})
    if PLAIN[kind].takes == "the context":
        return with_options(context)
    return with_options() if PLAIN[kind].is_class else with_options


@dataclass(frozen=True)
class Recipe:
    """Finds an installed plugin (or `FILE.py:NAME`) anew, in whichever process it is unpickled, and builds it."""

    kind: str
    name: str
    options: Mapping[str, Any]
    context: object

    def builder(self) -> Callable[[], Any]:
        """Import the plugin and check its options; what is returned builds the component. Raises `PluginError`."""
        selected = load(self.kind, self.name)
        selected.import_build()
        return partial(selected.build, selected.component.config.model_validate(dict(self.options)), self.context)

    def __call__(self) -> Any:
        """The component, built."""
        return self.builder()()


def load(kind: Kind | str, name: str, *, check_requires: bool = True, trust: FileTrust = EVERY_FILE) -> SelectedPlugin:
    """Import the plugin of that name and check that it fits this core.

    `FILE.py:NAME` names a plain function or class (see `Plain`). A file that `trust` runs none of has to be there.
    Raises `PluginError`: unknown, given twice, broken, made for another plugin API, not to be run, or (with
    `check_requires`) missing a module it needs.
    """
    if kind in PLAIN and is_file_reference(name):
        return _load_file(kind, name, trust)
    selected = load_ref(find(kind, name))
    if check_requires and (lack := unmet(selected.component)) is not None:
        raise PluginError(lack[0], where=selected.label, hint=lack[1])
    return selected


def _load_file(kind: str, reference: str, trust: FileTrust) -> SelectedPlugin:
    where = f'{SINGULAR[kind]} "{reference}"'
    if not trust.runs:
        path, name = split_reference(reference, where)
        return SelectedPlugin(kind, f"{path}:{name}", Component("", UnreadOptions), path.name, "file")
    path, found = load_function_file(reference, trust, where=where, is_class=PLAIN[kind].is_class)
    name = f"{path}:{reference.rpartition(':')[2]}"
    return SelectedPlugin(kind, name, component_of(found, kind, where=where), path.name, "file", found)


def has_options(ref: PluginRef) -> bool:
    """Whether it is more than a module or object of hooks, which is on when it is installed. Imports it."""
    return ref.kind != "hooks" or isinstance(import_target(ref), Component)


def load_ref(ref: PluginRef) -> SelectedPlugin:
    """Import one found plugin (`load` without the check of what it requires)."""
    found = import_target(ref)
    if isinstance(found, Component) and ref.kind in KINDS:
        _check_component(found, ref)
        return SelectedPlugin(ref.kind, ref.name, found, ref.distribution, ref.version)
    if ref.kind == "hooks":
        raise PluginError(
            "is on when it is installed, and has no options",
            where=ref.label,
            hint=f"remove it, or turn it off with hooks: {{disable: [{ref.name}]}}",
        )
    plain = PLAIN.get(ref.kind)
    if plain is None or not plain.fits(found):
        wanted = ["a rlhf_core.Component"] * (ref.kind in KINDS) + ([f"a {plain.noun}"] if plain is not None else [])
        raise PluginError(f"{ref.target} is a {type(found).__name__}, not {' or '.join(wanted)}", where=ref.label)
    component = component_of(found, ref.kind, where=ref.label, build=ref.target)
    return SelectedPlugin(ref.kind, ref.name, component, ref.distribution, ref.version, found)


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
