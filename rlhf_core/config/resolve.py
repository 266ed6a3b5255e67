"""From a run as one mapping to a run that is checked: plugins selected, every section validated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from pydantic import BaseModel

from ..errors import PluginError
from ..plugins.discovery import Selected, load
from ..plugins.trust import EVERY_FILE, FileTrust, is_file_reference
from ..types import SamplingParams
from ..util.did_you_mean import suggestion
from ..util.redact import ENVIRONMENT, hidden_parts, learn, learn_environment
from .command import commands_of
from .listed import listed_mapping, listed_plugins, with_default_logger
from .load import ENVIRONMENT_SECTION, PLUGIN_SECTIONS, expand
from .named_code import check_commands, check_model_code, check_named_files
from .named_functions import NamesFunctions, check_functions
from .problems import Problems
from .section import OwnProcesses, TransportConfig
from .sections import (
    DEFAULT_LOGGER,
    EngineConfig,
    EnvironmentConfig,
    EnvironmentEntry,
    HooksConfig,
    LoggingConfig,
    PromptsConfig,
    RewardEntry,
    RunConfig,
)
from .selected import Configured, SelectedEnvironment, SelectedReward
from .transport_fit import fit_to_transport

DEFAULT_PLUGINS: Mapping[str, str] = {
    "algorithm": "ppo",
    "strategy": "single",
    "engine": "hf",
    "transport": "local",
}
"""What a section that names no plugin gets; `prompts` has no default."""

DEFAULT_REWARDS: Sequence[Mapping[str, Any]] = ({"name": "exact-match"},)
"""What a run that samples answers and has no `rewards` gets; one with an environment is rewarded by that."""

TASKS: Mapping[str, Any] = {"name": "tasks"}
"""The `prompts` of a run with an environment and none of its own."""

SHARED_OPTIONS: Mapping[str, type[BaseModel]] = {
    "engines": EngineConfig,
    "prompts": PromptsConfig,
    "rewards": RewardEntry,
    "environments": EnvironmentEntry,
}
"""Kind -> options that core reads in the plugin's own section, beside the plugin's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRun:
    """A run with nothing left open: the core sections typed, every plugin selected and configured."""

    run: RunConfig
    algorithm: Configured
    strategy: Configured
    engine: Configured
    transport: Configured
    prompts: Configured
    eval_prompts: Configured | None
    """Another source for evaluation; None holds prompts of `prompts` out."""
    rewards: tuple[SelectedReward, ...]
    environment: SelectedEnvironment | None = None
    """None where a prompt has one answer."""
    hooks: tuple[Configured, ...] = ()
    """Hook plugins with options that the run lists."""
    loggers: tuple[Configured, ...] = ()
    """Where the metrics go, beside `metrics.jsonl`."""

    @property
    def reward_weights(self) -> dict[str, float]:
        """Name of each reward -> its weight in the combined score; the environment's comes first."""
        weights = {reward.name: reward.weight for reward in self.rewards}
        if self.environment is None:
            return weights
        return {ENVIRONMENT_SECTION: self.environment.options.weight, **weights}

    @property
    def sampling(self) -> SamplingParams:
        """How rollouts are sampled."""
        return self.run.engine.sampling()

    @property
    def own_processes(self) -> OwnProcesses | None:
        """Those that the transport starts itself."""
        assert isinstance(self.transport.config, TransportConfig)
        return self.transport.config.own_processes()

    @property
    def rolls_out(self) -> bool:
        """Whether answers are sampled to learn from."""
        return self.algorithm.component.feeds == "rollouts"

    @property
    def evaluates(self) -> bool:
        """Whether held-out prompts are answered and judged."""
        return self.run.eval is not None and bool(self.reward_weights)

    @property
    def generates(self) -> bool:
        """Whether an engine is needed at all."""
        return self.rolls_out or self.evaluates

    @property
    def commands(self) -> frozenset[tuple[str, ...]]:
        """The programs, with their arguments, that options of its plugins name."""
        parts = [getattr(self, name) for name in PLUGIN_SECTIONS]
        parts += [self.eval_prompts, self.environment and self.environment.selected, *self.rewards]
        parts += [*self.hooks, *self.loggers]
        return frozenset(tuple(command) for part in parts if part for _, command in commands_of(part.config))

    def to_mapping(self) -> dict[str, Any]:
        """The whole run as JSON values; `resolve` of it gives the same run again."""
        core = self.run.model_dump(mode="json")
        if core["eval"] is not None:
            core["eval"]["prompts"] = self.eval_prompts.to_mapping() if self.eval_prompts else None
        core["hooks"].update(listed_mapping(self.hooks))
        core["logging"].update({DEFAULT_LOGGER: False} | listed_mapping(self.loggers))
        own = {name: getattr(self, name).to_mapping() for name in PLUGIN_SECTIONS}
        for section in ("prompts", "engine"):
            own[section] = {"name": own[section].pop("name"), **core.pop(section), **own[section]}
        order = ("model", "prompts", "eval", "algorithm", "optimizer", "strategy")
        rewards = [reward.to_mapping() for reward in self.rewards]
        full = {**core, **own, "rewards": rewards}
        if self.environment is not None:
            full[ENVIRONMENT_SECTION] = self.environment.to_mapping()
        return {key: full[key] for key in (*order, "rewards", "reward_scaling", "engine", "transport", *full)}


def resolve(run: Mapping[str, Any], *, where: str = "run file", trust: FileTrust = EVERY_FILE) -> ResolvedRun:
    """Check a run: select its plugins, validate every section, look at what sections ask of each other.

    `where` is how errors call its source; `trust` says which files and programs that it names are run. Raises one
    `ConfigError` that lists all problems.
    """
    given = {key: value for key, value in expand(run).items() if value is not None}
    learn_environment()
    learn(given)
    if ENVIRONMENT_SECTION in given:
        given.setdefault("prompts", dict(TASKS))
    problems = Problems()
    for path in hidden_parts(given):
        hint = f"--set {path}={ENVIRONMENT}NAME gives it again, or --set {path}=VALUE"
        problems.add(path, "was hidden when this config was written down", hint)
    core = _core_sections(given, problems)
    chosen = {
        name: _plugin_section(kind, name, given.get(name, {}), problems, trust)
        for name, kind in PLUGIN_SECTIONS.items()
    }
    eval_prompts = _eval_prompts(given, chosen["prompts"], problems, trust)
    environment = _environment(given, chosen["algorithm"], problems, trust)
    rewards = _rewards(given, chosen["algorithm"], problems, trust)
    hooks = _listed("hooks", "hooks", given.get("hooks"), HooksConfig, problems, trust)
    loggers = _listed("loggers", "logging", with_default_logger(given.get("logging")), LoggingConfig, problems, trust)
    if core is not None:
        check_model_code(core.model, problems, trust)
    _check_score(given, rewards, problems)
    fit_to_transport(chosen, problems)
    problems.raise_if_any(where)
    assert core is not None
    plugins = {name: each for name, each in chosen.items() if each is not None}
    core = core.model_copy(
        update={
            "prompts": _shared_part(core.prompts, plugins["prompts"].config),
            "engine": _shared_part(core.engine, plugins["engine"].config),
        }
    )
    return ResolvedRun(
        run=core,
        eval_prompts=eval_prompts,
        rewards=tuple(rewards),
        environment=environment,
        hooks=hooks,
        loggers=loggers,
        **plugins,
    )


def _listed(
    kind: str, section: str, data: Any, core: type[BaseModel], problems: Problems, trust: FileTrust
) -> tuple[Configured, ...]:
    def check(path: str, name: str, options: dict[str, Any]) -> Configured | None:
        return _plugin_section(kind, path, {**options, "name": name}, problems, trust, name_path=path)

    return listed_plugins(section, data, tuple(core.model_fields), problems, check)


def _shared_part(core: BaseModel, plugin: BaseModel) -> BaseModel:
    """What core reads of a plugin's section; a plugin that subclasses core's options may have other defaults."""
    if not isinstance(plugin, type(core)):
        return core
    return type(core)(**{name: getattr(plugin, name) for name in type(core).model_fields})


def _core_sections(given: Mapping[str, Any], problems: Problems) -> RunConfig | None:
    others = {*PLUGIN_SECTIONS, ENVIRONMENT_SECTION, "rewards"}
    core: dict[str, Any] = {key: value for key, value in given.items() if key not in others}
    for section in ("prompts", "engine"):
        data = given.get(section)
        if isinstance(data, dict):
            known = SHARED_OPTIONS[PLUGIN_SECTIONS[section]].model_fields
            core[section] = {key: value for key, value in data.items() if key in known}
    for section, model in (("hooks", HooksConfig), ("logging", LoggingConfig)):
        if isinstance(core.get(section), dict):
            core[section] = {key: value for key, value in core[section].items() if key in model.model_fields}
    if isinstance(core.get("eval"), dict):
        core["eval"] = {key: value for key, value in core["eval"].items() if key != "prompts"}
    return problems.validate(RunConfig, core, also_known=sorted(others))


def _plugin_section(
    kind: str,
    path: str,
    data: Any,
    problems: Problems,
    trust: FileTrust = EVERY_FILE,
    name_path: str | None = None,
) -> Configured | None:
    """The plugin a section names, with the options that are the plugin's own; `name_path`: where its name stands."""
    if not isinstance(data, dict):
        problems.add(path, f"should be a plugin's name, or a mapping with `name` and its options (given {data!r})")
        return None
    name = data.get("name", DEFAULT_PLUGINS.get(path))
    if not isinstance(name, str):
        problems.add(f"{path}.name", "is required: the name of a plugin" if name is None else f"is no name: {name!r}")
        return None
    try:
        selected = load(kind, name, trust=trust)
        check_options(selected)
    except PluginError as error:
        problems.add_error(name_path or f"{path}.name", error)
        return None
    model = selected.component.config
    shared = options_of_core(selected)
    elsewhere = {"name", *(shared.model_fields if shared else ())}
    options = {key: value for key, value in data.items() if key not in elsewhere}
    check_named_files(options, path, problems, trust)
    config = problems.validate(model, options, path, also_known=sorted(elsewhere))
    if config is None:
        return None
    check_commands(config, path, problems, trust)
    if isinstance(config, NamesFunctions):
        check_functions(config, path, problems)
    inherited = {each.name: getattr(selected, each.name) for each in fields(Selected)}
    return Configured(**inherited, config=config)


def check_options(selected: Selected) -> None:
    """Raise `PluginError` where a plugin has an option of its own by a name that core reads in its section."""
    model = selected.component.config
    shared = SHARED_OPTIONS.get(selected.kind)
    read_by_core = options_of_core(selected)
    taken = sorted(set(model.model_fields) & {"name", *(read_by_core.model_fields if read_by_core else ())})
    if selected.kind == "transports" and not issubclass(model, TransportConfig):
        raise PluginError(
            "its options are no rlhf_core.config.TransportConfig, which says what processes are its own",
            where=selected.label,
            hint="the plugin's authors must derive its config from it",
        )
    if taken:
        subclass = f", or make its config a subclass of {shared.__module__}.{shared.__name__}" if shared else ""
        raise PluginError(
            f"its options {', '.join(taken)} have names that core reads itself",
            where=selected.label,
            hint=f"the plugin's authors must rename them{subclass if selected.kind != 'rewards' else ''}",
        )


def _eval_prompts(
    given: Mapping[str, Any], prompts: Configured | None, problems: Problems, trust: FileTrust
) -> Configured | None:
    """The source to evaluate on. Its limits are those of the run's prompts where it says nothing of them."""
    evaluation = given.get("eval")
    data = evaluation.get("prompts") if isinstance(evaluation, dict) else None
    if data is None:
        return None
    if isinstance(data, dict) and prompts is not None and isinstance(prompts.config, PromptsConfig):
        data = {**{name: getattr(prompts.config, name) for name in PromptsConfig.model_fields}, **data}
    return _plugin_section("prompts", "eval.prompts", data, problems, trust)


def _environment(
    given: Mapping[str, Any], algorithm: Configured | None, problems: Problems, trust: FileTrust
) -> SelectedEnvironment | None:
    """The section `environment`, held against the algorithm and what is done to scores."""
    data = given.get(ENVIRONMENT_SECTION)
    if data is None:
        return None
    environment = resolve_environment(data, problems, trust)
    if environment is None:
        return None
    if algorithm is not None and algorithm.component.feeds != "rollouts":
        problems.add(ENVIRONMENT_SECTION, f"{algorithm.name} learns from a dataset, not from what is played")
    scaling = given.get("reward_scaling")
    scales = isinstance(scaling, dict) and (scaling.get("clip") is not None or scaling.get("normalise"))
    if scales and algorithm is not None and algorithm.component.credits_turns:
        problems.add(
            "reward_scaling",
            f"{algorithm.name} gives each turn its own reward, but clip and normalise act on their sum: take them out, "
            "or use an algorithm without a critic",
        )
    return environment


def resolve_environment(data: Any, problems: Problems, trust: FileTrust = EVERY_FILE) -> SelectedEnvironment | None:
    """The environment that a section names, with core's options and its own. None where there are problems."""
    selected = _plugin_section("environments", ENVIRONMENT_SECTION, data, problems, trust)
    if not isinstance(data, dict):
        return None
    core = problems.validate(
        EnvironmentEntry, {key: data[key] for key in EnvironmentEntry.model_fields if key in data}, ENVIRONMENT_SECTION
    )
    if selected is None or core is None:
        return None
    options = EnvironmentConfig(**{key: getattr(core, key) for key in EnvironmentConfig.model_fields})
    return SelectedEnvironment(options, selected)


def _rewards(
    given: Mapping[str, Any], algorithm: Configured | None, problems: Problems, trust: FileTrust
) -> list[SelectedReward]:
    samples = algorithm is not None and algorithm.component.feeds == "rollouts"
    plays = ENVIRONMENT_SECTION in given
    entries = given.get("rewards", DEFAULT_REWARDS if samples and not plays else [])
    if not isinstance(entries, list | tuple):
        problems.add("rewards", "should be a list of rewards")
        return []
    if samples and not entries and not plays:
        assert algorithm is not None
        problems.add("rewards", f"is empty, but {algorithm.name} learns from rewards; add one: --reward exact-match")
    rewards: list[SelectedReward] = []
    for index, entry in enumerate(entries):
        reward = resolve_reward(entry, problems, f"rewards.{index}", trust)
        if reward is not None and any(reward.name == each.name for each in rewards):
            problems.add(f"rewards.{index}", f'a second reward "{reward.name}": give it a `label` of its own')
        elif reward is not None and plays and reward.name == ENVIRONMENT_SECTION:
            problems.add(f"rewards.{index}", "is called as the environment's own reward: give it a `label` of its own")
        elif reward is not None:
            rewards.append(reward)
    return rewards


def resolve_reward(entry: Any, problems: Problems, path: str, trust: FileTrust = EVERY_FILE) -> SelectedReward | None:
    """One entry of `rewards`, checked; None, and problems noted, where it is wrong."""
    core_keys = tuple(RewardEntry.model_fields)
    selected = _plugin_section("rewards", path, entry, problems, trust)
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        return None
    core = problems.validate(RewardEntry, {key: entry[key] for key in core_keys if key in entry}, path)
    if selected is None or core is None:
        return None
    is_file = is_file_reference(core.name)
    label = core.label or (selected.name.rpartition(":")[2] if is_file else selected.name)
    return SelectedReward(label, core.weight, core.call_options(), selected, selected.config)


def _check_score(given: Mapping[str, Any], rewards: Sequence[SelectedReward], problems: Problems) -> None:
    evaluation = given.get("eval")
    score = evaluation.get("score") if isinstance(evaluation, dict) else None
    labels = [*([ENVIRONMENT_SECTION] if ENVIRONMENT_SECTION in given else []), *(reward.name for reward in rewards)]
    if isinstance(score, str) and score not in labels and not len(problems):
        problems.add("eval.score", f'no reward "{score}" in this run{suggestion(score, labels)} (rewards: {labels})')


def options_of_core(selected: Selected) -> type[BaseModel] | None:
    """What core reads in the section of a plugin beside its own options; None where that is all among its own."""
    shared = SHARED_OPTIONS.get(selected.kind)
    return None if shared is None or issubclass(selected.component.config, shared) else shared


def option_names(kind: str, name: str) -> list[str]:
    """Options of a plugin, with those core reads beside them. Raises `PluginError`."""
    shared = SHARED_OPTIONS.get(kind)
    own = load(kind, name, check_requires=False).component.config.model_fields
    return list(dict.fromkeys([*(shared.model_fields if shared else ()), *own]))
