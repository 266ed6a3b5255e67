"""Sampling and training in one process, or in the SPMD processes of a launcher."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from ..algorithm import Algorithm, RolloutAlgorithm
from ..build import (
    TrainerModels,
    build_curriculum,
    build_engine,
    build_evaluator,
    build_passes,
    build_player,
    build_scorer,
    build_strategy,
    build_trained_models,
    model_dtype,
)
from ..config.resolve import ResolvedRun
from ..models.loading import load_policy
from ..protocols import RolloutEngine, WeightSync
from ..rewards.scorer import RewardScorer
from ..rollout.channel import LocalChannel, RankedRewardStates, success_of
from ..rollout.coordinator import RolloutCoordinator
from ..rollout.maker import PolicyExperienceMaker
from ..rollout.weight_sync import NoReceiver, build_engine_beside
from ..strategy import Strategy
from ..training.request import FitResult, RunRequest, SessionParts, Transport
from ..training.session import TrainerSession
from ..types import RolloutGroup

if TYPE_CHECKING:
    from .plugin import LocalConfig


def build(config: LocalConfig, context: None) -> Transport:
    """The transport of `transport: {name: local}`."""
    return LocalTransport()


class LocalTransport:
    """Every rank holds its part of the trainer, an engine, and the rewards."""

    def run(self, request: RunRequest) -> FitResult:
        strategy = build_strategy(request.resolved)
        with ExitStack() as stack:
            stack.callback(strategy.teardown)
            strategy.setup()
            algorithm = request.inputs.algorithm
            models = build_trained_models(request.resolved, algorithm, strategy, request.inputs.tokenizer)
            parts = _parts(request, strategy, algorithm, models, stack)
            session = TrainerSession(
                request.resolved,
                request.folder,
                strategy=strategy,
                algorithm=algorithm,
                models=models,
                parts=parts,
                hooks=request.hooks,
            )
            return session.fit(request.resume)


def _parts(
    request: RunRequest,
    strategy: Strategy,
    algorithm: Algorithm[Any, Any],
    models: TrainerModels,
    stack: ExitStack,
) -> SessionParts:
    """What surrounds the loop; what must be closed is closed by `stack`."""
    resolved, inputs = request.resolved, request.inputs
    channel, evaluator = None, None
    sync: WeightSync = NoReceiver()
    rewards: RankedRewardStates | None = None
    if resolved.generates:
        engine, sync = _engine(resolved, strategy, models)
        stack.callback(engine.close)
        scorer = build_scorer(resolved, strategy.device, cache_folder=request.folder.path / "reward-cache")
        stack.callback(scorer.close)
        rewards = RankedRewardStates(scorer, strategy)
        if isinstance(algorithm, RolloutAlgorithm):
            maker = _maker(request, strategy, algorithm, models, engine, scorer)
            stack.callback(maker.close)
            channel = _channel(request, strategy, algorithm, maker)
        if resolved.evaluates:
            evaluator = build_evaluator(
                resolved, engine, inputs.tokenizer, scorer, inputs.prompts, strategy, inputs.eval_prompts
            )
            stack.callback(evaluator.close)
    return SessionParts(
        channel=channel,
        prompts=inputs.prompts,
        sync=sync,
        evaluator=evaluator,
        interrupted=request.interrupted,
        rewards=rewards,
        eval_prompts=inputs.eval_prompts,
    )


def _engine(resolved: ResolvedRun, strategy: Strategy, models: TrainerModels) -> tuple[RolloutEngine, WeightSync]:
    model, seed = resolved.run.model, resolved.run.train.seed
    return build_engine_beside(
        strategy,
        models.policy,
        build=lambda module: build_engine(resolved, module, models.tokenizer, strategy),
        copy=lambda: load_policy(model, dtype=model_dtype(resolved, strategy), seed=seed),
    )


def _maker(
    request: RunRequest,
    strategy: Strategy,
    algorithm: RolloutAlgorithm,
    models: TrainerModels,
    engine: RolloutEngine,
    scorer: RewardScorer,
) -> PolicyExperienceMaker:
    resolved = request.resolved
    player = partial(build_player, resolved, engine, models.tokenizer)
    return PolicyExperienceMaker(
        player=player(),
        greedy_player=player(greedy=True) if algorithm.needs_greedy_answer else None,
        samples_per_prompt=resolved.run.train.samples_per_prompt,
        scorer=scorer,
        hooks=request.hooks,
        passes=build_passes(resolved, algorithm, strategy, {role: each.model for role, each in models.trained.items()}),
    )


def _channel(
    request: RunRequest, strategy: Strategy, algorithm: RolloutAlgorithm, maker: PolicyExperienceMaker
) -> LocalChannel:
    resolved, prompts = request.resolved, request.inputs.prompts
    coordinator: RolloutCoordinator[RolloutGroup] = RolloutCoordinator(
        num_episodes=resolved.run.train.episodes,
        prompts_per_episode=resolved.run.train.prompts_per_episode,
        max_staleness=0,
        sampler=build_curriculum(resolved, prompts),
    )
    return LocalChannel(
        coordinator=coordinator,
        prompt=prompts.prompt,
        maker=maker,
        strategy=strategy,
        keep=algorithm.keep,
        success=success_of(resolved.section("prompts.curriculum")),
    )
