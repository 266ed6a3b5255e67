"""Sampling and training in one process, or in the SPMD processes of a launcher."""

from __future__ import annotations

from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

from ..algorithm import RolloutAlgorithm
from ..rollout.channel import LocalChannel, RankedStates
from ..rollout.coordinator import RolloutCoordinator
from ..rollout.maker import PolicyExperienceMaker
from ..rollout.weight_sync import NoReceiver
from ..training.request import FitResult, RunRequest, SessionParts, Transport
from ..training.session import TrainerSession
from ..types import RolloutGroup
from ..wiring.models import build_strategy
from ..wiring.parts import TrainerParts

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
            run = stack.enter_context(closing(TrainerParts(request.inputs, strategy, run_folder=request.folder.path)))
            session = TrainerSession(run, request.folder, parts=_parts(request, run), hooks=request.hooks)
            return session.fit(request.resume)


def _parts(request: RunRequest, run: TrainerParts) -> SessionParts:
    """What surrounds the loop."""
    if not run.resolved.generates:
        return SessionParts(channel=None, sync=NoReceiver(), evaluator=None, interrupted=request.interrupted)
    algorithm, sync, scorer = run.inputs.algorithm, run.sync, run.scorer
    maker, channel = None, None
    if isinstance(algorithm, RolloutAlgorithm):
        maker = run.maker(request.hooks)
        channel = _channel(run, algorithm, maker)
    return SessionParts(
        sync=sync,
        states=RankedStates(scorer, run.place, maker),
        channel=channel,
        evaluator=run.evaluator,
        interrupted=request.interrupted,
    )


def _channel(run: TrainerParts, algorithm: RolloutAlgorithm, maker: PolicyExperienceMaker) -> LocalChannel:
    train, sampler = run.resolved.run.train, run.inputs.sampler()
    coordinator: RolloutCoordinator[RolloutGroup] = RolloutCoordinator(
        num_episodes=train.episodes,
        prompts_per_episode=train.prompts_per_episode,
        max_staleness=0,
        sampler=sampler,
    )
    return LocalChannel(
        coordinator=coordinator,
        prompt=run.inputs.prompts.prompt,
        maker=maker,
        place=run.place,
        keep=algorithm.keep,
        sampler=sampler,
    )
