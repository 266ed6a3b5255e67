"""Tries one plugin in this process: imports it, builds its schema, and runs what its kind can do without a GPU.

It is held to the rules of its contract that need no run, and built with its default options. A plugin that needs an
option without default (a path, a URL), or refuses the defaults here, is not broken but only not run; the verdict says
why.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ValidationError

from rlhf_core.components import (
    KINDS,
    AlgorithmContext,
    EngineContext,
    EnvironmentContext,
    HookContext,
    LoggerContext,
    OptimizerContext,
    PromptsContext,
    RewardContext,
    ScheduleContext,
    StrategyContext,
)
from rlhf_core.config.resolved import Configured
from rlhf_core.config.sections import ModelConfig
from rlhf_core.config.select import check_options
from rlhf_core.errors import EpisodeError, PluginError, UserInputError
from rlhf_core.hooks.relay import HookRelay
from rlhf_core.models.loading import load_policy, load_tokenizer
from rlhf_core.models.pretrained import ModelKind
from rlhf_core.plugins.discovery import PluginRef, check_clash, import_target
from rlhf_core.plugins.requirements import unmet
from rlhf_core.plugins.selected import Selected, has_options, load_ref
from rlhf_core.protocols import PromptSource
from rlhf_core.rewards import RewardCaller
from rlhf_core.rewards.values import BadScore, RewardFault, read_scores
from rlhf_core.types import GenerationRequest, SamplingParams
from rlhf_core.util.error_text import error_text
from rlhf_episodes.environment_shape import check_shape
from rlhf_episodes.section import EnvironmentConfig
from rlhf_episodes.selected import SelectedEnvironment
from rlhf_objective.named_functions import bind_function
from rlhf_testing.rules import broken_rules

TrialStatus = Literal["ok", "not run", "not installed", "broken"]


_SAMPLES_PER_PROMPT = 4


class TrialOutcome(NamedTuple):
    """The verdict on one plugin."""

    status: TrialStatus
    detail: str


class Wrong(Exception):
    """The plugin ran, but core cannot use its result; the text says why."""


def try_plugin(ref: PluginRef) -> TrialOutcome:
    """Import, schema, and a build and run with default options where possible."""
    try:
        check_clash(ref)
        return _try_component(ref) if ref.kind in KINDS and has_options(ref) else _try_other(ref)
    except PluginError as error:
        return TrialOutcome("broken", error.message)
    except Wrong as error:
        return TrialOutcome("broken", str(error))


def _try_component(ref: PluginRef) -> TrialOutcome:
    selected = load_ref(ref)
    check_options(selected)
    selected.component.config.model_json_schema()
    for rule in broken_rules(selected):
        raise Wrong(rule)
    if (lack := unmet(selected.component, ref.distribution)) is not None:
        return TrialOutcome("not installed", ": ".join(lack))
    summary = selected.component.summary
    if ref.kind == "sections":
        return TrialOutcome("ok", summary)  # there is nothing to build
    build = _checked(selected, selected.import_build())  # a verdict stands beside the name
    try:
        config = selected.component.config()
    except ValidationError as error:
        return TrialOutcome("not run", f"{summary} ({_first_problem(error)})")
    try:
        _TRIALS[ref.kind](selected, build, config)
    except UserInputError as error:
        return TrialOutcome("not run", f"{summary} ({error.message})")
    except (PluginError, Wrong):
        raise
    except Exception as error:  # a third-party plugin may raise anything
        raise Wrong(f"running it: {type(error).__name__}: {error}") from error
    return TrialOutcome("ok", summary)


def _checked(selected: Selected, build: Callable[..., Any]) -> Callable[..., Any]:
    def checked(config: BaseModel, context: object) -> Any:
        built = build(config, context)
        if (wrong := selected.misses(built)) is not None:
            raise Wrong(f"its build returned a {type(built).__name__}, which {wrong}")
        return built

    return checked


def _try_other(ref: PluginRef) -> TrialOutcome:
    import click

    if ref.kind in ("advantages", "policy_losses"):
        function = bind_function(ref.kind, ref.name, where="plugins check")  # type: ignore[arg-type]
        return TrialOutcome("ok", (inspect.getdoc(function) or "").partition("\n")[0])
    found = import_target(ref)
    if ref.kind == "endpoints":
        if not callable(found):
            raise Wrong(f"{ref.target} is a {type(found).__name__}, which starts no server")
    elif ref.kind == "quickstarts":
        if not (callable(getattr(found, "base_run", None)) and callable(getattr(found, "trainer_of", None))):
            raise Wrong(f"{ref.target} has no functions base_run and trainer_of")
    elif ref.kind == "reward_callers":
        if not (isinstance(found, type) and issubclass(found, RewardCaller)):
            raise Wrong(f"{ref.target} is not a subclass of RewardCaller")
    elif ref.kind == "hooks":
        HookRelay().register(found, name=ref.name)
    elif not isinstance(found, click.Command):
        raise Wrong(f"{ref.target} is a {type(found).__name__}, not a click command")
    return TrialOutcome("ok", "")


def _first_problem(error: ValidationError) -> str:
    problem = error.errors()[0]
    where = ".".join(map(str, problem["loc"]))
    needs = f"needs the option {where}" if problem["type"] == "missing" else problem["msg"]
    return needs.removeprefix("Value error, ")


def _reward(selected: Selected, build: Callable[..., Any], config: BaseModel) -> None:
    """Score three made-up answers. A reward that raises may lack a run's metadata; an invalid result is `Wrong`."""
    from .models import POLICY_PATH
    from .rollouts import make_rollout

    reward = build(config, RewardContext("cpu", 0, POLICY_PATH))
    rollouts = [make_rollout(text, prompt="2 + 2 = ", answer="4", sample_id=i) for i, text in enumerate(["4", "5", ""])]
    try:
        answer = reward(rollouts)
        if inspect.isawaitable(answer):
            answer = asyncio.run(_awaited(answer))
    except Exception as error:  # a third-party reward may raise anything
        raise UserInputError(f"made-up answers: {type(error).__name__}: {error}") from error
    try:
        bad = [score.reason for score in read_scores(answer, len(rollouts)) if isinstance(score, BadScore)]
    except RewardFault as error:
        raise Wrong(str(error)) from error
    if bad:
        raise Wrong(f"answered what is no score: {bad[0]}")


async def _awaited(answer: Any) -> Any:
    return await answer


def _prompts(selected: Selected, build: Callable[..., Any], config: BaseModel) -> None:
    source = build(config, PromptsContext(seed=0))
    if isinstance(source, PromptSource) and len(source) and "prompt" not in source[0]:
        raise Wrong(f"its first record has no `prompt`, only {sorted(source[0])}")


def _environment(selected: Selected, build: Callable[..., Any], config: BaseModel) -> None:
    """Play episodes with random text. An error in `reset` may come from missing prompts; any other is `Wrong`."""
    from .episodes import episode_tokenizer, play_episodes

    built = build(config, EnvironmentContext(seed=0))
    if not callable(getattr(built, "run", None)) and not isinstance(getattr(built, "tools", None), Mapping):
        try:
            check_shape(type(built), selected.label)
        except PluginError as error:
            raise Wrong(f"its build returned a {type(built).__name__}: {error.message}") from error
    configured = Configured.of(selected, config)
    options = EnvironmentConfig(max_turns=3, timeout_seconds=30.0).with_plugin(configured)
    environment = SelectedEnvironment(options, configured)
    try:
        play_episodes(environment, episode_tokenizer(chat=True), num_prompts=1)
    except EpisodeError as error:
        if error.message.startswith("reset "):
            raise UserInputError(f"a task without a prompt: {error.message}") from error
        raise Wrong(f"an episode fails: {error.message}") from error


def _algorithm(selected: Selected, build: Callable[..., Any], config: BaseModel) -> None:
    """Take a first update of a tiny model, on made-up answers or records."""
    from rlhf_core.algorithm import DatasetAlgorithm

    from .benches import RECORDS, dataset_bench, rollout_bench
    from .tiny import contract_tokenizer

    context = AlgorithmContext(SamplingParams(max_new_tokens=8), _SAMPLES_PER_PROMPT, contract_tokenizer())
    algorithm = build(config, context)
    untrained = {term.role for term in algorithm.terms.values()} - algorithm.roles
    if untrained:
        raise Wrong(f"it has loss terms for {sorted(untrained)}, which are not among its roles")
    try:
        if isinstance(algorithm, DatasetAlgorithm):
            dataset_bench(lambda: algorithm, RECORDS, device="cpu").first_update()
        else:
            rollout_bench(lambda: algorithm, samples_per_prompt=_SAMPLES_PER_PROMPT, device="cpu").first_update()
    except UserInputError:
        raise
    except Exception as error:  # a third-party algorithm may raise anything
        raise Wrong(f"its first update fails: {error_text(error, type(algorithm).__module__)}") from error


def _strategy(selected: Selected, build: Callable[..., Any], config: BaseModel) -> None:
    build(config, StrategyContext("cpu"))


def _engine(selected: Selected, build: Callable[..., Any], config: BaseModel) -> None:
    import torch

    from .models import POLICY_PATH

    model, cpu = ModelConfig(path=POLICY_PATH, device="cpu"), torch.device("cpu")
    tokenizer = load_tokenizer(model)
    policy = load_policy(model, dtype=torch.float32, seed=0, tokenizer=tokenizer)
    context = EngineContext(policy, tokenizer, cpu, 0, model_path=model.path)
    engine = build(config, context)
    try:
        requests = [GenerationRequest(sample_id=7, prompt_ids=(5, 6, 14))]
        answers = list(engine.generate(requests, SamplingParams(max_new_tokens=3)))
    finally:
        engine.close()
    if [answer.sample_id for answer in answers] != [7]:
        raise Wrong(f"asked for one completion of sample 7, it answered {answers}")


def _transport(selected: Selected, build: Callable[..., Any], config: BaseModel) -> None:
    build(config, None)


def _hook(selected: Selected, build: Callable[..., Any], config: BaseModel) -> None:
    with TemporaryDirectory() as folder:
        built = build(config, HookContext(run_folder=Path(folder)))
        if not [name for name in dir(built) if name.startswith("rlhf_")]:
            raise Wrong(f"its build returned a {type(built).__name__}, which has no hook")
        HookRelay().register(built, name=selected.name)


def _logger(selected: Selected, build: Callable[..., Any], config: BaseModel) -> None:
    """Build it only: logging might reach a server."""
    with TemporaryDirectory() as folder:
        build(config, LoggerContext(run_folder=Path(folder), run={}))


def _optimizer(selected: Selected, build: Callable[..., Any], config: BaseModel) -> None:
    """Build it and make one step."""
    import torch

    from rlhf_strategies import StrategyBase

    strategy = StrategyBase(device=torch.device("cpu"), precision="fp32", timeout_seconds=60.0)
    model = torch.nn.Linear(2, 2)
    optimizer = build(config, OptimizerContext(dict(model.named_parameters()), lr=1e-3, strategy=strategy))
    trained = strategy.prepare(model, optimizer)
    strategy.backward(model(torch.ones(1, 2)).sum(), optimizer)
    strategy.step(trained)


def _schedule(selected: Selected, build: Callable[..., Any], config: BaseModel) -> None:
    factor = build(config, ScheduleContext(warmup_updates=2, total_updates=10))
    values = [float(factor(update)) for update in range(2, 11)]
    if not all(math.isfinite(value) and value >= 0 for value in values):
        raise Wrong(f"its factors of the learning rate are {values}")


def _model(selected: Selected, build: Callable[..., Any], config: BaseModel) -> None:
    built = build(config, ModelConfig(path="builtin:tiny-digits"))
    if not isinstance(built, ModelKind):
        raise Wrong(f"build returned a {type(built).__name__}, which is no ModelKind")


_TRIALS: Mapping[str, Callable[[Selected, Callable[..., Any], BaseModel], None]] = {
    "rewards": _reward,
    "prompts": _prompts,
    "environments": _environment,
    "algorithms": _algorithm,
    "strategies": _strategy,
    "engines": _engine,
    "transports": _transport,
    "hooks": _hook,
    "loggers": _logger,
    "optimizers": _optimizer,
    "schedules": _schedule,
    "models": _model,
}
