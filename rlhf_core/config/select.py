"""Selects the plugins that a run's sections name, and checks their options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, cast

from pydantic import BaseModel
from pydantic_core import PydanticCustomError

from ..errors import PluginError
from ..plugins.discovery import PluginRef, check_clash, discover
from ..plugins.functions import component_of
from ..plugins.selected import SelectedPlugin, load, load_ref
from ..plugins.trust import EVERY_FILE, FileTrust, referenced_files
from ..util.did_you_mean import suggestion
from .load import OWN_REWARD, PLUGIN_SECTIONS
from .problems import Problems
from .processes import StrategyConfig, TransportConfig
from .resolved import Configured
from .section import Section
from .sections import (
    METRICS_OF_SCORE,
    EngineConfig,
    OptimizerConfig,
    PromptsConfig,
    RewardEntry,
    RunConfig,
)

DEFAULT_PLUGINS: Mapping[str, str] = {
    "algorithm": "ppo",
    "strategy": "single",
    "engine": "hf",
    "transport": "local",
    "optimizer": "adamw",
}
"""Default plugin of each section. `prompts` does not have one."""

CORE_OPTIONS: Mapping[str, type[Section]] = {
    "engines": EngineConfig,
    "optimizers": OptimizerConfig,
    "prompts": PromptsConfig,
    "rewards": RewardEntry,
    "strategies": StrategyConfig,
    "transports": TransportConfig,
}
"""Kind -> options of core that are part of the section of each of its plugins."""


def shared_options(kind: str) -> type[Section] | None:
    """Return the options that core, or the section that `selects` the kind, adds to a plugin's own section."""
    selecting = (model for model in section_models().values() if model.selects == kind)
    return CORE_OPTIONS.get(kind) or next(selecting, None)


def section_models() -> dict[str, type[Section]]:
    """Return the options of each installed section by dotted name. Broken sections are left out."""
    models: dict[str, type[Section]] = {}
    for ref in discover("sections").values():
        with suppress(PluginError):  # reported when the section is used
            models[ref.name] = section_model(ref)
    return models


def section_model(ref: PluginRef) -> type[Section]:
    """Return the options of an installed section. Raises `PluginError` if it is broken."""
    selected = load_ref(ref)
    check_options(selected)
    return cast("type[Section]", selected.component.config)


OTHER_SECTIONS = frozenset({*PLUGIN_SECTIONS, "rewards"})
"""Sections that core reads in addition to those of `RunConfig`."""


@dataclass(frozen=True, slots=True)
class Selector:
    """Selects plugins, and adds their problems to `problems`."""

    problems: Problems
    trust: FileTrust = EVERY_FILE
    """Which files of code and programs that the run names may be executed."""

    def plugin(
        self, kind: str, path: str, data: Any, *, name_path: str | None = None, section: SelectedPlugin | None = None
    ) -> Configured | None:
        """Return the plugin that a section names, with its own options and those that core or `section` adds.

        name_path: place of its name. section: the plugin's section that selects it, and whose options are added to its
        own. If None, core's options of its kind are added.
        """
        problems = self.problems
        if not isinstance(data, dict):
            problems.add(path, f"should be a plugin's name, or a mapping with `name` and its options (given {data!r})")
            return None
        name = data.get("name", DEFAULT_PLUGINS.get(path))
        if not isinstance(name, str):
            message = "is required: the name of a plugin" if name is None else f"is not a name: {name!r}"
            problems.add(f"{path}.name", message)
            return None
        name_path = name_path or f"{path}.name"
        shared = CORE_OPTIONS.get(kind) if section is None else cast("type[Section]", section.component.config)
        try:
            selected = load(kind, name, trust=self.trust)
            check_options(selected, shared)
        except PluginError as error:
            problems.add_error(name_path, error)
            return None
        options = {key: value for key, value in data.items() if key != "name"}
        configured = self.options(selected, options, path, shared, ["name", *section_names(path)], name_path)
        return configured if configured is None else replace(configured, section=section)

    def options(
        self,
        selected: SelectedPlugin,
        data: Mapping[str, Any],
        path: str,
        shared: type[Section] | None = None,
        also_known: Sequence[str] = (),
        name_path: str | None = None,
    ) -> Configured | None:
        """Check a plugin's own options and the `shared` ones. `also_known`: other keys of its section."""
        self._check_files(data, path)
        config = self.problems.validate(mixed(selected.component.config, shared), data, path, also_known, context=self)
        if config is None:
            return None
        if isinstance(config, Section):
            try:
                config = config.with_plugin(selected)
            except PluginError as error:
                self.problems.add_error(name_path or path, error)
                return None
            if selections := tuple(config.selections()):
                plugins = [self.plugin(of, f"{path}.{at}", section) for of, at, section in selections]
                checked = [each.to_mapping() for each in plugins if each is not None]
                config = config.with_selections(checked) if len(checked) == len(plugins) else config
        return Configured.of(selected, config, path)

    def listed(self, kind: str, section: str, values: Any, core: type[BaseModel]) -> tuple[Configured, ...]:
        """Return the plugins that a section lists: `NAME: {option: value}`, or true (or empty) for the defaults.

        NAME: false leaves one out. `core`: the section's keys that are not names of plugins.
        """
        if not isinstance(values, Mapping):
            return ()  # reported by the check of core's own keys of the section
        reserved = tuple(core.model_fields)
        plugins: list[Configured] = []
        for name, options in values.items():
            if name in reserved or options is False:
                continue
            path = f"{section}.{name}"
            suggested = suggestion(name, reserved)
            settings = {} if options is None or options is True else options
            if not isinstance(settings, Mapping):
                self.problems.add(path, f"should be a mapping of options, true or false (given {options!r}){suggested}")
                continue
            configured = self.plugin(kind, path, {**settings, "name": name}, name_path=path)
            if configured is None:
                if suggested:
                    self.problems.add(path, f"is not a key of {section}{suggested}")
            elif any(each.name == configured.name for each in plugins):
                self.problems.add(path, f"{configured.name} is listed twice")
            else:
                plugins.append(configured)
        return tuple(plugins)

    def _function(self, function: Callable[..., Any], path: str) -> Configured | None:
        """Return a reward that was passed as an object of this process."""
        name = getattr(function, "__name__", type(function).__name__)
        module = getattr(function, "__module__", type(function).__module__)
        try:
            component = component_of(function, "rewards", where=f'reward "{name}"')
        except PluginError as error:
            self.problems.add_error(path, error)
            return None
        selected = SelectedPlugin("rewards", f"{module}:{name}", component, module, "function", function)
        return self.options(selected, {}, path, RewardEntry)

    def rewards(self, entries: Any, path: str, *, has_player: bool) -> tuple[Configured, ...]:
        """Return the rewards of a list. has_player: whether an environment provides a reward with a reserved name."""
        if not isinstance(entries, list | tuple):
            self.problems.add(path, "should be a list of rewards")
            return ()
        rewards: dict[str, Configured] = {}
        for index, entry in enumerate(entries):
            where = f"{path}.{index}"
            reward = self._function(entry, where) if callable(entry) else self.plugin("rewards", where, entry)
            if reward is None:
                continue
            label = str(reward.typed(RewardEntry).label)
            if label in rewards:
                self.problems.add(where, f'a second reward "{label}": give it its own `label`')
            elif label in METRICS_OF_SCORE:
                message = f'"{label}" is a metric of the weighted score: give the reward another `label`'
                self.problems.add(f"{where}.label", message)
            elif has_player and label == OWN_REWARD:
                self.problems.add(where, "has the name of the environment's own reward: give it another `label`")
            else:
                rewards[label] = reward
        return tuple(rewards.values())

    def section(self, ref: PluginRef, value: Any) -> Configured | None:
        """Return a plugin's section, or the plugin that it selects, with the options of both."""
        try:
            check_clash(ref)
            selected, model = load_ref(ref), section_model(ref)
        except PluginError as error:
            self.problems.add_error(ref.name, error)
            return None
        if model.selects:
            return self.plugin(model.selects, ref.name, value, section=selected)
        if model.short_option and isinstance(value, str | int | float):
            value = {model.short_option: value}
        if not isinstance(value, dict | None):
            self.problems.add(ref.name, f"should be a mapping of options, or true (given {value!r})")
            return None
        return self.options(selected, value or {}, ref.name, also_known=section_names(ref.name))

    def _check_files(self, options: Mapping[str, Any], path: str) -> None:
        """Add a problem for each file of code, such as a filter or functions for tools, that may not be run."""
        for key, value in options.items():
            for file in sorted(referenced_files(value)):
                try:
                    self.trust.check(file, f"{path}.{key}")
                except PluginError as error:
                    self.problems.add(f"{path}.{key}", error.message, error.hint)

    def check_command(self, command: Sequence[str]) -> None:
        """Raise a pydantic error if a program that an option names may not be started."""
        try:
            self.trust.check_command(command)
        except PluginError as error:
            raise PydanticCustomError("untrusted", "{text}", {"text": error.message, "hint": error.hint}) from error


def section_names(parent: str = "") -> list[str]:
    """Return the names of installed sections in the section `parent` (by default at the top level)."""
    parts = (ref.name.rpartition(".") for ref in discover("sections").values())
    return [last for place, _, last in parts if place == parent]


def check_options(selected: SelectedPlugin, shared: type[Section] | None = None) -> None:
    """Raise `PluginError` if options lack the base of their kind, or have names of the `shared` options."""
    model = selected.component.config
    if selected.kind == "sections" and selected.name in {*RunConfig.model_fields, *OTHER_SECTIONS}:
        raise PluginError("is a section of rlhf-core itself", where=selected.label, hint="its authors must rename it")
    if selected.kind == "sections":
        if not issubclass(model, Section):
            hint = "the plugin's authors must derive its config from it"
            raise PluginError("its config is not a rlhf_core.Section", where=selected.label, hint=hint)
        return
    reserved = {"name"} if shared is None or issubclass(model, shared) else {"name", *shared.model_fields}
    if taken := sorted(reserved & model.model_fields.keys()):
        subclass = "" if shared is None else f", or make its config a subclass of {shared.__module__}.{shared.__name__}"
        raise PluginError(
            f"its options {', '.join(taken)} have names that core reads itself",
            where=selected.label,
            hint=f"the plugin's authors must rename them{subclass}",
        )


@lru_cache
def mixed(model: type[BaseModel], shared: type[Section] | None) -> type[BaseModel]:
    """Return the options of a plugin together with the `shared` ones."""
    if shared is None or issubclass(model, shared):
        return model
    if issubclass(shared, model):
        return shared
    extra = model.model_config.get("extra", "forbid")  # otherwise that of `shared` would win
    return type(model.__name__, (model, shared), {"__module__": model.__module__, "model_config": {"extra": extra}})
