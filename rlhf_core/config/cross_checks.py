"""Checks between the sections of a run, and of what its model brings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..plugins.trust import FileTrust
from ..util.did_you_mean import suggestion
from .load import ENVIRONMENT_SECTION
from .problems import Problems
from .processes import other_strategies, too_many
from .resolved import Configured, SelectedReward
from .section import PolicyLossSection, TransportConfig
from .sections import ModelConfig


def labels(given: Mapping[str, Any], rewards: Sequence[SelectedReward]) -> list[str]:
    """Names of a run's rewards; the environment's comes first."""
    return [*([ENVIRONMENT_SECTION] if ENVIRONMENT_SECTION in given else []), *(reward.name for reward in rewards)]


def check_score(path: str, evaluation: Any, known: Sequence[str], problems: Problems) -> None:
    """Add a problem where the `score` of an evaluation is none of the `known` rewards."""
    score = evaluation.get("score") if isinstance(evaluation, dict) else None
    if isinstance(score, str) and score not in known and not len(problems):
        problems.add(
            f"{path}.score", f'no reward "{score}" in this run{suggestion(score, known)} (rewards: {list(known)})'
        )


def check_curriculum(
    prompts: Configured | None, algorithm: Configured | None, known: Sequence[str], problems: Problems
) -> None:
    """Hold a curriculum against the algorithm and the `known` rewards."""
    options = getattr(prompts.config, "curriculum", None) if prompts is not None else None
    if options is None:
        return
    if algorithm is not None and algorithm.component.feeds != "rollouts":
        problems.add("prompts.curriculum", f"{algorithm.name} learns from a dataset: there is no answer to judge by")
    elif options.reward is not None and options.reward not in known and not len(problems):
        told = f'no reward "{options.reward}" in this run{suggestion(options.reward, known)} (rewards: {list(known)})'
        problems.add("prompts.curriculum.reward", told)


def check_environment(algorithm: Configured | None, scaling: Any, problems: Problems) -> None:
    """Hold an environment against the algorithm and what is done to scores."""
    if algorithm is None:
        return
    if algorithm.component.feeds != "rollouts":
        problems.add(ENVIRONMENT_SECTION, f"{algorithm.name} learns from a dataset, not from what is played")
    scales = isinstance(scaling, dict) and (scaling.get("clip") is not None or scaling.get("normalise"))
    if scales and algorithm.component.credits_turns:
        problems.add(
            "reward_scaling",
            f"{algorithm.name} gives each turn its own reward, but clip and normalise act on their sum: take them out, "
            "or use an algorithm without a critic",
        )


def check_model_code(model: ModelConfig, problems: Problems, trust: FileTrust) -> None:
    """Add a problem for code that comes with a model; a hub model's lies outside of every folder."""
    if not model.trust_remote_code or not trust.runs or trust.allows_model(model.path):
        return
    hint = "if you trust the model, add --trust"
    problems.add("model.trust_remote_code", f"code of {model.path} would be run, which no one here has named", hint)


def fit_to_transport(chosen: dict[str, Configured | None], problems: Problems) -> None:
    """Hold the transport's own processes against the strategy; weigh late samples where it brings such."""
    transport, strategy, algorithm = chosen["transport"], chosen["strategy"], chosen["algorithm"]
    engine = chosen["engine"]
    if transport is None:
        return
    assert isinstance(transport.config, TransportConfig)
    own = transport.config.own_processes()
    if own is not None and strategy is not None and (problem := too_many(strategy, own.trainers)):
        hint = other_strategies(own.trainers)
        problems.add(f"transport.{own.option}", f"{problem}, not {own.trainers}; {hint}")
    if transport.config.updates_in_flight() and engine is not None and not engine.component.in_flight:
        problem = f"the engine {engine.name} takes new weights between two batches only"
        problems.add("transport.weights", problem, "say weights: between-batches, or take an engine made for it")
    late = transport.config.staleness_bound() > 0
    if late and algorithm is not None and isinstance(algorithm.config, PolicyLossSection):
        chosen["algorithm"] = replace(algorithm, config=algorithm.config.weighing_late_samples())
