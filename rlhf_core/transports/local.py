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
    build_player,
    build_reference_pass,
    build_scorer,
    build_strategy,
    build_trained_models,
    model_dtype,
)
from ..config.resolve import ResolvedRun
from ..models.loading import load_policy
from ..prompts.stream import PromptStream
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
            parts = _LocalParts(request, strategy, algorithm, models, stack).build()
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


class _LocalParts:
    """Builds what surrounds the loop; what must be closed is closed by `stack`."""

    def __init__(
        self,
        request: RunRequest,
        strategy: Strategy,
        algorithm: Algorithm[Any, Any],
        models: TrainerModels,
        stack: ExitStack,
    ) -> None:
        self._request = request
        self._resolved: ResolvedRun = request.resolved
        self._strategy = strategy
        self._algorithm = algorithm
        self._models = models
        self._stack = stack

    def build(self) -> SessionParts:
        inputs = self._request.inputs
        prompts = inputs.prompts
        channel, evaluator = None, None
        sync: WeightSync = NoReceiver()
        rewards: RankedRewardStates | None = None
        if self._resolved.generates:
            engine, sync = self._engine()
            scorer = build_scorer(
                self._resolved, self._strategy.device, cache_folder=self._request.folder.path / "reward-cache"
            )
            self._stack.callback(scorer.close)
            rewards = RankedRewardStates(scorer, self._strategy)
            if isinstance(self._algorithm, RolloutAlgorithm):
                channel = self._channel(engine, scorer, prompts)
            if self._resolved.evaluates:
                evaluator = build_evaluator(
                    self._resolved, engine, inputs.tokenizer, scorer, prompts, self._strategy, inputs.eval_prompts
                )
                self._stack.callback(evaluator.close)
        return SessionParts(
            channel=channel,
            prompts=prompts,
            sync=sync,
            evaluator=evaluator,
            interrupted=self._request.interrupted,
            rewards=rewards,
            eval_prompts=inputs.eval_prompts,
        )

    def _engine(self) -> tuple[RolloutEngine, WeightSync]:
        strategy, resolved = self._strategy, self._resolved
        model, seed = resolved.run.model, resolved.run.train.seed
        engine, sync = build_engine_beside(
            strategy,
            self._models.policy,
            build=lambda module: build_engine(resolved, module, self._models.tokenizer, strategy),
            copy=lambda: load_policy(model, dtype=model_dtype(resolved, strategy), seed=seed),
        )
        self._stack.callback(engine.close)
        return engine, sync

    def _channel(self, engine: RolloutEngine, scorer: RewardScorer, prompts: PromptStream) -> LocalChannel:
        resolved, strategy, algorithm = self._resolved, self._strategy, self._algorithm
        assert isinstance(algorithm, RolloutAlgorithm)
        train = resolved.run.train
        critic = self._models.trained.get("critic")
        scoring = build_reference_pass(
            resolved, algorithm, strategy, self._models.policy, None if critic is None else critic.model
        )
        player = partial(build_player, resolved, engine, self._models.tokenizer)
        maker = PolicyExperienceMaker(
            player=player(),
            greedy_player=player(greedy=True) if algorithm.needs_greedy_answer else None,
            samples_per_prompt=train.samples_per_prompt,
            scorer=scorer,
            hooks=self._request.hooks,
            reference_pass=scoring,
        )
        self._stack.callback(maker.close)
        coordinator: RolloutCoordinator[RolloutGroup] = RolloutCoordinator(
            num_episodes=train.episodes,
            prompts_per_episode=train.prompts_per_episode,
            max_staleness=0,
            sampler=build_curriculum(resolved, prompts),
        )
        return LocalChannel(
            coordinator=coordinator,
            prompt=prompts.prompt,
            maker=maker,
            strategy=strategy,
            keep=algorithm.keep,
            success=success_of(resolved.run.prompts.curriculum),
        )
