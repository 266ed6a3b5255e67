"""Resolves a run: from one mapping to selected plugins and validated sections."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ..errors import ConfigError, PluginError
from ..plugins.discovery import PluginRef, discover
from ..plugins.requirements import not_installed
from ..plugins.selected import load
from ..plugins.trust import EVERY_FILE, NO_FILE, FileTrust
from ..util.redact import hidden_parts, learn, learn_environment
from .fitting import adapt_sections, check_sections
from .load import PLUGIN_SECTIONS, LoadedRun, expand
from .problems import Problems
from .resolved import INVALID, Configured
from .resolved import ResolvedRun as ResolvedRun
from .section import Section
from .sections import (
    DEFAULT_LOGGER,
    EvalConfig,
    HooksConfig,
    LoggingConfig,
    OptimizerConfig,
    PromptsConfig,
    RunConfig,
)
from .select import OTHER_SECTIONS, Selector, section_model, section_names

logger = logging.getLogger("rlhf")

DEFAULT_REWARDS: Sequence[Mapping[str, Any]] = ({"name": "exact-match"},)
"""Rewards of a run that samples answers and does not set any. An environment provides its own reward."""

TASKS: Mapping[str, Any] = {"name": "tasks"}
"""`prompts` of a run that does not set them, with a section that does not need any, such as an environment."""


def resolve(
    run: Mapping[str, Any],
    *,
    where: str = "run file",
    trust: FileTrust = EVERY_FILE,
    functions: Sequence[Callable[..., Any]] = (),
    problems: Problems | None = None,
) -> ResolvedRun:
    """Return a checked run: plugins selected, every section validated, and all sections consistent.

    Args:
        run: the run file as a mapping.
        where: name of the run's source in errors.
        trust: which files and programs that the run names may be executed.
        functions: further rewards.
        problems: collects the problems, for callers that inspect them after the error.

    Raises:
        ConfigError: the run has problems. The message lists all of them.
    """
    known_keys = {*OTHER_SECTIONS, *RunConfig.model_fields, *section_names()}
    values = {key: value for key, value in expand(run).items() if value is not None or key not in known_keys}
    learn_environment()
    learn(values)
    problems = Problems(run.overrides if isinstance(run, LoadedRun) else None) if problems is None else problems
    for path in hidden_parts(values):
        problems.add(path, "was redacted when this config was saved", f"set it again with --set {path}=VALUE")
    select = Selector(problems, trust)
    sections = _take_sections(values, select)
    # The options of an invalid section are unknown, so problems that depend on them are not reported.
    valid = {name: each.typed(Section) for name, each in sections.items() if each is not INVALID}
    graders = [name for name, section in valid.items() if section.reward_weight() is not None]
    for name in graders[1:]:
        problems.add(name, f"its player and that of {graders[0]} both give the reward environment: remove one section")
    has_player = bool(graders) or len(valid) < len(sections)
    if has_player or any(section.needs_no_prompts for section in valid.values()):
        values.setdefault("prompts", dict(TASKS))
    core = _core_sections(values, problems)
    plugins = {name: select.plugin(kind, name, values.get(name, {})) for name, kind in PLUGIN_SECTIONS.items()}
    prompts, algorithm, optimizer = plugins["prompts"], plugins["algorithm"], plugins["optimizer"]
    options = None if optimizer is None else optimizer.typed(OptimizerConfig).schedule
    schedule = None if options is None else select.plugin("schedules", "optimizer.schedule", options)
    evaluation = EvalConfig(num_prompts=0) if core is None or core.eval is None else core.eval
    eval_prompts = _eval_prompts(evaluation, prompts, select)
    eval_rewards = {
        name: select.rewards(each.rewards, f"eval.sets.{name}.rewards", has_player=has_player)
        for name, each in evaluation.sets.items()
        if each.rewards is not None
    }
    num_problems = len(problems)
    rewards = _rewards(values, algorithm, select, functions, has_player)
    has_rewards = len(problems) == num_problems
    hooks = select.listed("hooks", "hooks", values.get("hooks"), HooksConfig)
    loggers = select.listed("loggers", "logging", _with_default_logger(values.get("logging")), LoggingConfig)
    resolved = ResolvedRun(
        run=INVALID if core is None else core,
        eval_prompts=eval_prompts,
        rewards=rewards if has_rewards else INVALID,
        eval_rewards=eval_rewards,
        hooks=hooks,
        loggers=loggers,
        sections=sections,
        trust=trust,
        schedule=schedule or INVALID,
        **{name: each or INVALID for name, each in plugins.items()},  # type: ignore[arg-type] # its fields are the keys
    )
    check_sections(resolved, problems)
    problems.raise_if_any(where)
    return adapt_sections(resolved)


def without_removed(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return an older resolved run file without options that were removed since. No code of files is run."""
    problems, config = Problems(), expand(run)
    with suppress(ConfigError):  # reported when the run file is used
        resolve(config, trust=NO_FILE, problems=problems)
    for path in problems.removed:
        *place, key = path.split(".")
        holder: Any = config
        for part in place:
            holder = holder[int(part)] if isinstance(holder, list) else holder[part]
        holder.pop(key, None)
    return config


def resolve_reward(entry: Mapping[str, Any], where: str) -> Configured:
    """Check one entry of `rewards`.

    Args:
        entry: the entry as a mapping with `name`.
        where: name of its source in errors.

    Returns:
        The selected reward with its options.

    Raises:
        ConfigError: the entry has problems. The message lists all of them.
    """
    problems = Problems()
    reward = Selector(problems).plugin("rewards", str(entry["name"]), entry)
    problems.raise_if_any(where)
    assert reward is not None
    return reward


def _take_sections(run: dict[str, Any], select: Selector) -> dict[str, Configured]:
    """Remove the plugins' sections from the mapping `run`, and check their options.

    A section with problems is `INVALID`. A section may be nested in another plugin's section.
    """
    refs = sorted(discover("sections").values(), key=lambda ref: ref.name.count("."))
    options = {ref.name: _pop(run, ref.name) for ref in reversed(refs)}
    sections: dict[str, Configured] = {}
    for ref in refs:
        value = options[ref.name]
        if (value is None or value is False) and not _is_active_when_absent(ref):
            continue
        sections[ref.name] = select.section(ref, {} if value is True else value) or INVALID
    return sections


def _pop(run: Any, name: str) -> Any:
    """Remove and return the value of a dotted key, None if missing."""
    *parents, last = name.split(".")
    for part in parents:
        run = run.get(part) if isinstance(run, dict) else None
    return run.pop(last, None) if isinstance(run, dict) else None


def _is_active_when_absent(ref: PluginRef) -> bool:
    try:
        return any(section_model(each).active_when_absent for each in (ref, *ref.clashes))
    except PluginError as error:
        logger.warning("the section %s is ignored: %s", ref.name, error)
        return False


def _core_sections(run: Mapping[str, Any], problems: Problems) -> RunConfig | None:
    core: dict[str, Any] = {key: value for key, value in run.items() if key not in OTHER_SECTIONS}
    for section, model in (("hooks", HooksConfig), ("logging", LoggingConfig)):
        if isinstance(data := run.get(section), dict):
            core[section] = {key: value for key, value in data.items() if key in model.model_fields}
    return problems.validate(RunConfig, core, also_known=sorted({*OTHER_SECTIONS, *section_names()}))


def _with_default_logger(data: Any) -> Any:
    """Turn TensorBoard on if it is installed, unless the section sets it."""
    if not isinstance(data, dict | None) or DEFAULT_LOGGER in (data or {}):
        return data
    try:
        is_installed = not not_installed(load("loggers", DEFAULT_LOGGER, check_requires=False).component.requires)
    except PluginError:
        is_installed = False
    return {**(data or {}), DEFAULT_LOGGER: is_installed}


def _rewards(
    run: Mapping[str, Any],
    algorithm: Configured | None,
    select: Selector,
    functions: Sequence[Callable[..., Any]],
    has_player: bool,
) -> tuple[Configured, ...]:
    """Select the run's rewards, and those passed as functions. Report that none is set if one is needed."""
    component = None if algorithm is None or has_player else algorithm.component
    needs_some = component is not None and component.feeds == "rollouts" and component.learns_from_rewards
    entries = run.get("rewards", DEFAULT_REWARDS if needs_some and not functions else [])
    if functions and isinstance(entries, list | tuple):
        entries = [*entries, *functions]
    if needs_some and not entries:
        assert algorithm is not None
        message = f"is empty, but {algorithm.name} learns from rewards: add one with --reward exact-match"
        select.problems.add("rewards", message)
    return select.rewards(entries, "rewards", has_player=has_player)


def _eval_prompts(evaluation: EvalConfig, prompts: Configured | None, select: Selector) -> dict[str | None, Configured]:
    """Return the source of each set that has its own, by name. The section `eval` has the name None."""
    sets: dict[Any, Any] = {None: evaluation, **evaluation.sets}
    return {
        name: _held_out_source(each.prompts, name, prompts, select) or INVALID
        for name, each in sets.items()
        if each.prompts is not None
    }


def _held_out_source(
    data: dict[str, Any], set_name: str | None, prompts: Configured | None, select: Selector
) -> Configured | None:
    """Select a source of evaluation prompts. Limits that it does not set are those of the run's prompts."""
    if prompts is not None:
        limits = prompts.typed(PromptsConfig)
        data = {"max_prompt_tokens": limits.max_prompt_tokens, "too_long": limits.too_long, **data}
    return select.plugin("prompts", "eval.prompts" if set_name is None else f"eval.sets.{set_name}.prompts", data)
