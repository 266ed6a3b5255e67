"""From a run as one mapping to a run that is checked: plugins selected, every section validated."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from ..errors import PluginError
from ..plugins.discovery import load, missing_modules
from ..plugins.trust import EVERY_FILE, FileTrust
from ..util.redact import ENVIRONMENT, hidden_parts, learn, learn_environment
from .cross_checks import check_curriculum, check_environment, check_model_code, check_score, fit_to_transport, labels
from .load import ENVIRONMENT_SECTION, PLUGIN_SECTIONS, expand
from .problems import Problems
from .resolved import Configured, SelectedEnvironment, SelectedEvalSet, SelectedReward
from .resolved import ResolvedRun as ResolvedRun
from .sections import DEFAULT_LOGGER, EvalSetOptions, HooksConfig, LoggingConfig, PromptsConfig, RunConfig
from .select import SHARED_OPTIONS, Selector

DEFAULT_REWARDS: Sequence[Mapping[str, Any]] = ({"name": "exact-match"},)
"""Rewards of a run that samples answers and names none; an environment rewards by itself."""

TASKS: Mapping[str, Any] = {"name": "tasks"}
"""The `prompts` of a run with an environment and none of its own."""

_SET_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_RESERVED_SET_NAMES = ("sampled", "loss")


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
    select = Selector(problems, trust)
    chosen = {name: select.plugin(kind, name, given.get(name, {})) for name, kind in PLUGIN_SECTIONS.items()}
    prompts, algorithm = chosen["prompts"], chosen["algorithm"]
    evaluation = given.get("eval")
    data = evaluation.get("prompts") if isinstance(evaluation, dict) else None
    eval_prompts = None if data is None else _held_out_source(data, "eval.prompts", prompts, select)
    environment = select.environment(given[ENVIRONMENT_SECTION]) if ENVIRONMENT_SECTION in given else None
    if environment is not None:
        check_environment(algorithm, given.get("reward_scaling"), problems)
    rewards = _rewards(given, algorithm, select)
    hooks = select.listed("hooks", "hooks", given.get("hooks"), HooksConfig)
    loggers = select.listed("loggers", "logging", _with_default_logger(given.get("logging")), LoggingConfig)
    if core is not None:
        check_model_code(core.model, problems, trust)
    known = labels(given, rewards)
    check_score("eval", evaluation, known, problems)
    check_curriculum(prompts, algorithm, known, problems)
    eval_sets = _eval_sets(given, prompts, rewards, select)
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


def resolve_reward(entry: Any, problems: Problems, path: str, trust: FileTrust = EVERY_FILE) -> SelectedReward | None:
    """One entry of `rewards`, checked; None, and problems noted, where it is wrong."""
    return Selector(problems, trust).reward(entry, path)


def resolve_environment(data: Any, problems: Problems, trust: FileTrust = EVERY_FILE) -> SelectedEnvironment | None:
    """The section `environment`, checked; None, and problems noted, where it is wrong."""
    return Selector(problems, trust).environment(data)


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


def _with_default_logger(data: Any) -> Any:
    """TensorBoard is on where it is installed, unless the section says otherwise."""
    if DEFAULT_LOGGER in (data or {}) or not isinstance(data, dict | None):
        return data
    try:
        is_there = not missing_modules(load("loggers", DEFAULT_LOGGER, check_requires=False).component)
    except PluginError:
        is_there = False
    return {**(data or {}), DEFAULT_LOGGER: is_there}


def _rewards(given: Mapping[str, Any], algorithm: Configured | None, select: Selector) -> list[SelectedReward]:
    plays = ENVIRONMENT_SECTION in given
    needs_some = (
        not plays
        and algorithm is not None
        and algorithm.component.feeds == "rollouts"
        and algorithm.component.learns_from_rewards
    )
    entries = given.get("rewards", DEFAULT_REWARDS if needs_some else [])
    if needs_some and not entries:
        assert algorithm is not None
        told = f"is empty, but {algorithm.name} learns from rewards; add one: --reward exact-match"
        select.problems.add("rewards", told)
    return select.rewards(entries, "rewards", plays=plays)


def _held_out_source(data: Any, path: str, prompts: Configured | None, select: Selector) -> Configured | None:
    """Its limits are those of the run's prompts where it says nothing of them."""
    if isinstance(data, dict) and prompts is not None and isinstance(prompts.config, PromptsConfig):
        data = {**{name: getattr(prompts.config, name) for name in ("max_prompt_tokens", "too_long")}, **data}
    return select.plugin("prompts", path, data)


def _eval_sets(
    given: Mapping[str, Any], prompts: Configured | None, rewards: Sequence[SelectedReward], select: Selector
) -> tuple[SelectedEvalSet, ...]:
    """The entries of `eval.sets`; what one does not say of sampling is as in `eval`."""
    problems = select.problems
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
            reserved = ", ".join(_RESERVED_SET_NAMES)
            problems.add(path, f"a set's name has letters, digits, . _ and -, and is none of {reserved}")
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
        source = _held_out_source(data.get("prompts", {}), f"{path}.prompts", prompts, select)
        plays = ENVIRONMENT_SECTION in given
        chosen = None if own is None else select.rewards(own, f"{path}.rewards", plays=plays)
        named = labels(given, rewards if chosen is None else chosen)
        if not named:
            problems.add(f"{path}.rewards", "is empty: say how its answers are judged")
        check_score(path, data, named, problems)
        if options is not None and source is not None:
            found.append(SelectedEvalSet(name, options, source, None if chosen is None else tuple(chosen)))
    return tuple(found)
