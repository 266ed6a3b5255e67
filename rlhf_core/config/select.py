"""Selects the plugins that a run's sections name, and checks their options."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, cast

from pydantic import BaseModel

from ..errors import PluginError
from ..plugins.discovery import PluginRef, check_clash, discover, find
from ..plugins.functions import component_of
from ..plugins.selected import Selected, load, load_ref
from ..plugins.trust import EVERY_FILE, FileTrust, is_file_reference, referenced_files
from ..util.did_you_mean import suggestion
from .load import OWN_REWARD, PLUGIN_SECTIONS
from .problems import ModelT, Problems
from .processes import TransportConfig
from .resolved import METRICS_OF_SCORE, Configured, SelectedReward, SelectedSection
from .section import Section, commands_of
from .sections import (
    EngineConfig,
    OptimizerConfig,
    PromptsConfig,
    RewardCallOptions,
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
"""The default plugin of each section; `prompts` has none."""

CORE_OPTIONS: Mapping[str, type[Section]] = {
    "engines": EngineConfig,
    "optimizers": OptimizerConfig,
    "prompts": PromptsConfig,
}
"""Kind -> options that the config of each of its plugins has."""


def shared_options(kind: str) -> type[Section] | None:
    """The options of core, or of the section that `selects` the kind, that stand in a plugin's section with its own."""
    if kind == "rewards":
        return RewardEntry
    selecting = (model for model in section_models().values() if model.selects == kind)
    return CORE_OPTIONS.get(kind) or next(selecting, None)


def reward_callers(options: RewardCallOptions) -> list[PluginRef]:
    """The callers of a reward with these options, outermost first. Raises `PluginError` if an option lacks its caller.

    Those for every reward come first, by name, then those for rewards that set the option of their name.
    """
    switches = {"cache": options.cache, "isolate": options.isolate}
    names = [*sorted(discover("reward_callers").keys() - switches), *(name for name, on in switches.items() if on)]
    return [find("reward_callers", name) for name in names]


def section_models() -> dict[str, type[Section]]:
    """Dotted name -> options of each installed section; broken ones are left out."""
    found: dict[str, type[Section]] = {}
    for ref in discover("sections").values():
        with suppress(PluginError):  # reported to whoever uses the section
            found[ref.name] = section_model(ref)
    return found


def section_model(ref: PluginRef) -> type[Section]:
    """Options of an installed section. Raises `PluginError` if it is broken."""
    selected = load_ref(ref)
    check_options(selected)
    return cast("type[Section]", selected.component.config)


OTHER_SECTIONS = frozenset({*PLUGIN_SECTIONS, "rewards"})
"""Sections that core reads beside those of `RunConfig`."""

_BASES: Mapping[str, tuple[type[BaseModel], str]] = {
    "transports": (TransportConfig, "rlhf_core.config.TransportConfig, which says what processes are its own"),
    "sections": (Section, "rlhf_core.Section"),
}


@dataclass(frozen=True, slots=True)
class Selector:
    """Selects plugins, and adds what is wrong with them to `problems`."""

    problems: Problems
    trust: FileTrust = EVERY_FILE
    """Which files of code and programs that the run names are run."""

    def plugin(
        self, kind: str, path: str, data: Any, *, name_path: str | None = None, beside: Iterable[str] = ()
    ) -> Configured | None:
        """The plugin that a section names, with the options that are its own.

        name_path: where its name stands. beside: further keys of the section, which are not the plugin's.
        """
        problems = self.problems
        if not isinstance(data, dict):
            problems.add(path, f"should be a plugin's name, or a mapping with `name` and its options (given {data!r})")
            return None
        name = data.get("name", DEFAULT_PLUGINS.get(path))
        if not isinstance(name, str):
            told = "is required: the name of a plugin" if name is None else f"is no name: {name!r}"
            problems.add(f"{path}.name", told)
            return None
        try:
            selected = load(kind, name, trust=self.trust)
            check_options(selected)
        except PluginError as error:
            problems.add_error(name_path or f"{path}.name", error)
            return None
        elsewhere = {"name", *beside}
        self._check_files({key: data[key] for key in beside if key in data}, path)
        options = {key: value for key, value in data.items() if key not in elsewhere}
        return self.options(selected, options, path, sorted({*elsewhere, *section_names(path)}))

    def options(
        self, selected: Selected, given: Mapping[str, Any], path: str, also_known: Sequence[str] = ()
    ) -> Configured | None:
        """A plugin with the options that are its own, checked; `also_known`: other keys of the section `path`."""
        self._check_files(given, path)
        config = self.problems.validate(_options_model(selected), given, path, also_known)
        if config is None:
            return None
        self._check_commands(config, path)
        if isinstance(config, Section) and (selections := tuple(config.selections())):
            found = [self.plugin(of, f"{path}.{at}", section) for of, at, section in selections]
            checked = [each.to_mapping() for each in found if each is not None]
            config = config.with_selections(checked) if len(checked) == len(found) else config
        return Configured.of(selected, config)

    def listed(self, kind: str, section: str, given: Any, core: type[BaseModel]) -> tuple[Configured, ...]:
        """The plugins that a section lists: `NAME: {option: value}`, or true (or nothing) for one with its defaults.

        NAME: false leaves one out. `core`: the keys of the section that are no plugin's name.
        """
        if not isinstance(given, Mapping):
            return ()  # said where core's own keys of the section are checked
        reserved = tuple(core.model_fields)
        found: list[Configured] = []
        for name, options in given.items():
            if name in reserved or options is False:
                continue
            path = f"{section}.{name}"
            if options is not None and options is not True and not isinstance(options, Mapping):
                hint = suggestion(name, reserved)
                self.problems.add(path, f"should be a mapping of options, true or false (given {options!r}){hint}")
                continue
            known = len(self.problems)
            own = dict(options) if isinstance(options, Mapping) else {}
            configured = self.plugin(kind, path, {**own, "name": name}, name_path=path)
            if configured is None:
                if len(self.problems) > known and (near := suggestion(name, reserved)):
                    self.problems.add(path, f"is no key of {section}{near}")
            elif any(each.name == configured.name for each in found):
                self.problems.add(path, f"{configured.name} is listed twice")
            else:
                found.append(configured)
        return tuple(found)

    def reward(self, entry: Any, path: str) -> SelectedReward | None:
        """One entry of `rewards`, with core's options and its own."""
        selected = self.plugin("rewards", path, entry, beside=RewardEntry.model_fields.keys() - {"name"})
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            return None
        core = self._core_part(RewardEntry, entry, path)
        if selected is None or core is None:
            return None
        options = core.call_options()
        try:
            reward_callers(options.fitted_to(selected.component))
        except PluginError as error:
            self.problems.add_error(path, error)
        label = core.label or (selected.name.rpartition(":")[2] if is_file_reference(core.name) else selected.name)
        return SelectedReward(label, core.weight, options, selected)

    def _function(self, function: Callable[..., Any], path: str) -> SelectedReward | None:
        """A reward given as an object of this process."""
        name = getattr(function, "__name__", type(function).__name__)
        module = getattr(function, "__module__", type(function).__module__)
        try:
            component = component_of(function, "rewards", where=f'reward "{name}"')
        except PluginError as error:
            self.problems.add_error(path, error)
            return None
        selected = Selected("rewards", f"{module}:{name}", component, module, "function", function)
        return SelectedReward(name, 1.0, RewardCallOptions(), Configured.of(selected, component.config()))

    def rewards(self, entries: Any, path: str, *, plays: bool) -> list[SelectedReward]:
        """plays: whether there is an environment, whose reward has a name of its own."""
        if not isinstance(entries, list | tuple):
            self.problems.add(path, "should be a list of rewards")
            return []
        rewards: list[SelectedReward] = []
        for index, entry in enumerate(entries):
            where = f"{path}.{index}"
            reward = self._function(entry, where) if callable(entry) else self.reward(entry, where)
            if reward is not None and any(reward.name == each.name for each in rewards):
                self.problems.add(where, f'a second reward "{reward.name}": give it a `label` of its own')
            elif reward is not None and reward.name in METRICS_OF_SCORE:
                told = f'"{reward.name}" is a metric of the weighted score: give the reward another `label`'
                self.problems.add(f"{where}.label", told)
            elif reward is not None and plays and reward.name == OWN_REWARD:
                self.problems.add(where, "is called as the environment's own reward: give it a `label` of its own")
            elif reward is not None:
                rewards.append(reward)
        return rewards

    def section(self, ref: PluginRef, value: Any) -> SelectedSection | None:
        """A section that a plugin brings, with the plugin that it names, if it `selects` one."""
        try:
            check_clash(ref)
            selected = load_ref(ref)
            check_options(selected)
        except PluginError as error:
            self.problems.add_error(ref.name, error)
            return None
        if kind := cast("type[Section]", selected.component.config).selects:
            return self._selecting(selected, kind, ref.name, value)
        if not isinstance(value, dict | None):
            self.problems.add(ref.name, f"should be a mapping of options (given {value!r})")
            return None
        found = self.options(selected, value or {}, ref.name, section_names(ref.name))
        return None if found is None else SelectedSection.of(found, found.config)

    def _selecting(self, selected: Selected, kind: str, path: str, value: Any) -> SelectedSection | None:
        model = cast("type[Section]", selected.component.config)
        plugin = self.plugin(kind, path, value, beside=model.model_fields)
        own = self._core_part(model, value, path) if isinstance(value, dict) else None
        if plugin is None or own is None:
            return None
        try:
            own = own.with_plugin(plugin)
        except PluginError as error:
            self.problems.add_error(f"{path}.name", error)
            return None
        return replace(SelectedSection.of(selected, own), plugin=plugin)

    def _core_part(self, model: type[ModelT], data: Mapping[str, Any], path: str) -> ModelT | None:
        return self.problems.validate(model, {key: data[key] for key in model.model_fields if key in data}, path)

    def _check_files(self, options: Mapping[str, Any], path: str) -> None:
        """Add a problem for each file of code that a plugin's options name, such as a filter or functions for tools.

        What may not be run is one; where nothing is run, a file that is not there.
        """
        for key, value in options.items():
            for file in sorted(referenced_files(value)):
                try:
                    if self.trust.runs:
                        self.trust.check(file, f"{path}.{key}")
                    elif not file.is_file():
                        self.problems.add(f"{path}.{key}", f"no such file: {file}", "paths start at the current folder")
                except PluginError as error:
                    self.problems.add_error(f"{path}.{key}", error)

    def _check_commands(self, config: BaseModel, path: str) -> None:
        """Add a problem for each program that a plugin's options name."""
        for key, command in commands_of(config) if self.trust.runs else ():
            try:
                self.trust.check_command(command, f"{path}.{key}")
            except PluginError as error:
                self.problems.add(f"{path}.{key}", error.message, error.hint)


def section_names(parent: str = "") -> list[str]:
    """Installed sections in the section `parent` (by default those of the top level), without its name."""
    parts = (ref.name.rpartition(".") for ref in discover("sections").values())
    return [last for place, _, last in parts if place == parent]


def check_options(selected: Selected) -> None:
    """Raise `PluginError` where options lack the base of their kind, or have names that core reads in their section."""
    model = selected.component.config
    if selected.kind == "sections" and selected.name in {*RunConfig.model_fields, *OTHER_SECTIONS}:
        raise PluginError("is a section of rlhf-core itself", where=selected.label, hint="its authors must rename it")
    base, told = _BASES.get(selected.kind, (BaseModel, ""))
    if not issubclass(model, base):
        raise PluginError(
            f"its options are no {told}",
            where=selected.label,
            hint="the plugin's authors must derive its config from it",
        )
    if selected.kind == "sections":
        return
    core, beside = CORE_OPTIONS.get(selected.kind), shared_options(selected.kind)
    has_core = beside is None or issubclass(model, beside)
    reserved = {"name"} if beside is None or has_core else {"name", *beside.model_fields}
    if taken := sorted(reserved & model.model_fields.keys()):
        subclass = f", or make its config a subclass of {core.__module__}.{core.__name__}" if core else ""
        raise PluginError(
            f"its options {', '.join(taken)} have names that core reads itself",
            where=selected.label,
            hint=f"the plugin's authors must rename them{subclass}",
        )


def _options_model(selected: Selected) -> type[BaseModel]:
    """Its options, with core's of its kind among them."""
    own, core = selected.component.config, CORE_OPTIONS.get(selected.kind)
    return own if core is None or issubclass(own, core) else _with_options(own, core)


@lru_cache
def _with_options(model: type[BaseModel], core: type[Section]) -> type[BaseModel]:
    extra = model.model_config.get("extra", "forbid")  # core's would win
    return type(model.__name__, (model, core), {"__module__": model.__module__, "model_config": {"extra": extra}})
