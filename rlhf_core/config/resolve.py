"""From a run as one mapping to a run that is checked: plugins selected, every section validated."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from pydantic import BaseModel

from ..errors import PluginError
from ..plugins.discovery import Selected, load
from ..plugins.trust import EVERY_FILE, NO_FILE, FileTrust, is_file_reference
from ..util.redact import ENVIRONMENT, hidden_parts, learn, learn_environment
from .cross_checks import check_curriculum, check_score, labels
from .listed import listed_plugins, with_default_logger
from .load import ENVIRONMENT_SECTION, PLUGIN_SECTIONS, expand
from .named_code import check_commands, check_model_code, check_named_files
from .named_functions import NamesFunctions, check_functions, with_absolute_files
from .problems import Problems
from .resolved import ResolvedRun as ResolvedRun
from .section import SelectsPlugins, TransportConfig
from .sections import (
    EngineConfig,
    EnvironmentConfig,
    EnvironmentEntry,
    EvalSetOptions,
    HooksConfig,
    LoggingConfig,
    PromptsConfig,
    RewardEntry,
    RunConfig,
)
from .selected import Configured, SelectedEnvironment, SelectedEvalSet, SelectedReward
from .transport_fit import fit_to_transport

DEFAULT_PLUGINS: Mapping[str, str] = {
    "algorithm": "ppo",
    "strategy": "single",
    "engine": "hf",
    "transport": "local",
}
"""The default plugin of each section; `prompts` has none."""

DEFAULT_REWARDS: Sequence[Mapping[str, Any]] = ({"name": "exact-match"},)
"""Rewards of a run that samples answers and names none; an environment rewards by itself."""

TASKS: Mapping[str, Any] = {"name": "tasks"}
"""The `prompts` of a run with an environment and none of its own."""

SHARED_OPTIONS: Mapping[str, type[BaseModel]] = {
    "engines": EngineConfig,
    "prompts": PromptsConfig,
    "rewards": RewardEntry,
    "environments": EnvironmentEntry,
}
"""Kind -> options that core reads in the plugin's own section, beside the plugin's."""

_SET_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_RESERVED_SET_NAMES = ("sampled", "loss")
_RESERVED_TEXT = ", ".join(_RESERVED_SET_NAMES)


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
    check_score("eval", given.get("eval"), labels(given, rewards), problems)
    check_curriculum(chosen["prompts"], chosen["algorithm"], labels(given, rewards), problems)
    eval_sets = resolve_eval_sets(given, chosen["prompts"], rewards, problems, trust)
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
        eval_sets=eval_sets,
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
    """Core's options within a plugin's; a plugin that subclasses them may have other defaults."""
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
        evaluation = core["eval"]
        core["eval"] = {key: value for key, value in evaluation.items() if key not in ("prompts", "sets")}
        if evaluation.get("sets") and not evaluation.get("prompts"):
            core["eval"].setdefault("num_prompts", 0)
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
    check_named_files({key: value for key, value in data.items() if key != "name"}, path, problems, trust)
    config = problems.validate(model, options, path, also_known=sorted(elsewhere))
    if config is None:
        return None
    check_commands(config, path, problems, trust)
    if isinstance(config, NamesFunctions):
        before = len(problems)
        check_functions(config, path, problems, trust)
        config = with_absolute_files(config) if len(problems) == before else config
    if isinstance(config, SelectsPlugins):
        selections = config.selections()
        found = [_plugin_section(of, f"{path}.{at}", section, problems, trust) for of, at, section in selections]
        checked = [each.to_mapping() for each in found if each is not None]
        config = config.with_selected(checked) if len(checked) == len(found) else config
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
    """The source to evaluate on."""
    evaluation = given.get("eval")
    data = evaluation.get("prompts") if isinstance(evaluation, dict) else None
    return None if data is None else _held_out_source(data, "eval.prompts", prompts, problems, trust)


def _held_out_source(
    data: Any, path: str, prompts: Configured | None, problems: Problems, trust: FileTrust
) -> Configured | None:
    """Its limits are those of the run's prompts where it says nothing of them."""
    if isinstance(data, dict) and prompts is not None and isinstance(prompts.config, PromptsConfig):
        data = {**{name: getattr(prompts.config, name) for name in ("max_prompt_tokens", "too_long")}, **data}
    return _plugin_section("prompts", path, data, problems, trust)


def resolve_eval_sets(
    given: Mapping[str, Any],
    prompts: Configured | None,
    rewards: Sequence[SelectedReward],
    problems: Problems,
    trust: FileTrust = EVERY_FILE,
) -> tuple[SelectedEvalSet, ...]:
    """The entries of `eval.sets`; what one does not say of sampling is as in `eval`."""
    evaluation = given.get("eval")
    sets = evaluation.get("sets") if isinstance(evaluation, dict) else None
    if not isinstance(evaluation, dict) or sets is None:
        return ()
    if not isinstance(sets, dict):
        problems.add("eval.sets", "should be a mapping of names to sets, each with `prompts`")
        return ()
    found: list[SelectedEvalSet] = []
    for name, data in sets.items():
        path = f"eval.sets.{name}"
        if not _SET_NAME.fullmatch(name) or name in _RESERVED_SET_NAMES:
            problems.add(path, "a set's name has letters, digits, . _ and -, and is none of " + _RESERVED_TEXT)
        if not isinstance(data, dict):
            problems.add(path, f"should be a mapping with `prompts` (given {data!r})")
            continue
        own = data.get("rewards")
        inherited = [key for key in EvalSetOptions.model_fields if key in evaluation and key != "num_prompts"]
        shared = {key: evaluation[key] for key in inherited if own is None or key != "score"}
        options = problems.validate(
            EvalSetOptions,
            {**shared, **{key: value for key, value in data.items() if key not in ("prompts", "rewards")}},
            path,
            also_known=("prompts", "rewards"),
        )
        source = _held_out_source(data.get("prompts", {}), f"{path}.prompts", prompts, problems, trust)
        chosen = (
            None if own is None else _reward_list(own, f"{path}.rewards", ENVIRONMENT_SECTION in given, problems, trust)
        )
        judges = rewards if chosen is None else chosen
        named = labels(given, judges)
        if not named:
            problems.add(f"{path}.rewards", "is empty: say how its answers are judged")
        check_score(path, data, named, problems)
        if options is not None and source is not None:
            found.append(SelectedEvalSet(name, options, source, None if chosen is None else tuple(chosen)))
    return tuple(found)


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
    samples = samples and algorithm is not None and algorithm.component.learns_from_rewards
    plays = ENVIRONMENT_SECTION in given
    entries = given.get("rewards", DEFAULT_REWARDS if samples and not plays else [])
    if samples and not entries and not plays:
        assert algorithm is not None
        problems.add("rewards", f"is empty, but {algorithm.name} learns from rewards; add one: --reward exact-match")
    return _reward_list(entries, "rewards", plays, problems, trust)


def _reward_list(entries: Any, path: str, plays: bool, problems: Problems, trust: FileTrust) -> list[SelectedReward]:
    """plays: whether there is an environment, whose reward has a name of its own."""
    if not isinstance(entries, list | tuple):
        problems.add(path, "should be a list of rewards")
        return []
    rewards: list[SelectedReward] = []
    for index, entry in enumerate(entries):
        where = f"{path}.{index}"
        reward = resolve_reward(entry, problems, where, trust)
        if reward is not None and any(reward.name == each.name for each in rewards):
            problems.add(where, f'a second reward "{reward.name}": give it a `label` of its own')
        elif reward is not None and plays and reward.name == ENVIRONMENT_SECTION:
            problems.add(where, "is called as the environment's own reward: give it a `label` of its own")
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


def options_of_core(selected: Selected) -> type[BaseModel] | None:
    """Core's options that stand in a plugin's section beside its own; None where its own include them."""
    shared = SHARED_OPTIONS.get(selected.kind)
    return None if shared is None or issubclass(selected.component.config, shared) else shared


def option_names(kind: str, name: str) -> list[str]:
    """Options of a plugin, with those core reads beside them; a file is read, not run. Raises `PluginError`."""
    shared = SHARED_OPTIONS.get(kind)
    own = load(kind, name, check_requires=False, trust=NO_FILE).component.config.model_fields
    return list(dict.fromkeys([*(shared.model_fields if shared else ()), *own]))
