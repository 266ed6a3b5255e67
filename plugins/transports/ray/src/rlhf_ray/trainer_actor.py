"""Trainer actor of a run: one rank of the process group, running core's loop."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from rlhf_core.algorithm import Algorithm, RolloutAlgorithm
from rlhf_core.build import build_algorithm, build_run_prompts, build_strategy, build_trained_models
from rlhf_core.hooks import HookRelay
from rlhf_core.hookspecs import TrainerHooks
from rlhf_core.models import load_tokenizer
from rlhf_core.rollout import NoReceiver
from rlhf_core.runfolder import RunFolder
from rlhf_core.training import FitResult, SessionParts, TrainerSession

from .actor_context import ActorContext, ActorSpec, Heartbeat, settle
from .calls import ask
from .maker_parts import trained_names
from .ray_channel import RayChannel
from .ray_sync import RunSync

if TYPE_CHECKING:
    from rlhf_core.build import TrainerModels
    from rlhf_core.prompts import PromptStream
    from rlhf_core.protocols import WeightSync
    from rlhf_core.strategy import Strategy


class TrainerActor:
    """One rank. Rank 0 writes the run folder and talks to the coordinator for all."""

    def __init__(self, name: str, spec: ActorSpec) -> None:
        self._context = ActorContext(name, spec)
        self._coordinator = spec.coordinator
        self._config = self._context.config

    def place(self) -> tuple[str, str, int, int]:
        """Node id, address, a free port there, and this process's id."""
        node = ray.get_runtime_context().get_node_id()
        # The node's address in this cluster: 127.0.0.1 in a local one, whatever the host name resolves to.
        address = next(str(each["NodeManagerAddress"]) for each in ray.nodes() if each["NodeID"] == node)
        with socket.socket() as probe:
            probe.bind((address, 0))
            port = int(probe.getsockname()[1])
        return node, address, port, os.getpid()

    def fit(self, env_info: dict[str, str], resume: str | None) -> FitResult:
        """Train to the end (see `TrainerSession.fit`). `env_info`: its place in the process group."""
        with ExitStack() as stack:
            every = self._config.heartbeat_seconds / 4
            alive = partial(self._coordinator.alive.remote, self._context.name)
            stack.enter_context(Heartbeat(alive, every_seconds=every))
            settle(env_info, num_threads=self._context.spec.num_threads)
            resolved = self._context.resolved
            strategy = build_strategy(resolved)
            stack.callback(self._context.sender.flush)
            stack.callback(strategy.teardown)
            strategy.setup()
            tokenizer = load_tokenizer(resolved.run.model)
            algorithm = build_algorithm(resolved, tokenizer)
            models = build_trained_models(resolved, algorithm, strategy, tokenizer)
            prompts = build_run_prompts(resolved, tokenizer)
            if strategy.is_main:
                wait = self._config.start_timeout_seconds
                ask(self._coordinator, "wait_for_makers", wait, wait_seconds=wait)
            session = TrainerSession(
                resolved,
                RunFolder(Path(self._context.spec.folder)),
                strategy=strategy,
                algorithm=algorithm,
                models=models,
                parts=self._parts(strategy, algorithm, models, prompts),
                hooks=self._context.hooks(TrainerHooks) if strategy.is_main else HookRelay(),
            )
            return session.fit(None if resume is None else Path(resume))

    def _parts(
        self, strategy: Strategy, algorithm: Algorithm[Any, Any], models: TrainerModels, prompts: PromptStream
    ) -> SessionParts:
        config, resolved, is_main = self._config, self._context.resolved, strategy.is_main
        channel: RayChannel | None = None
        sync: WeightSync = NoReceiver()
        if resolved.generates:
            trained = {role: trained_names(strategy.unwrap(each.model)) for role, each in models.trained.items()}
            # An environment's tasks may have no prompt; any token distinguishes two sets of weights.
            canary = [prompts.prompt(position).prompt_ids or (0,) for position in range(config.canary_prompts)]
            sync = sent = RunSync(self._coordinator, strategy, models.trained, trained, config, canary)
            timeout = config.episode_timeout_seconds
            channel = RayChannel(self._coordinator, strategy, resolved, timeout_seconds=timeout, metrics=sent.metrics)
        return SessionParts(
            channel=channel if isinstance(algorithm, RolloutAlgorithm) else None,
            prompts=prompts,
            sync=sync,
            evaluator=channel if resolved.evaluates else None,
            interrupted=lambda: is_main and bool(ask(self._coordinator, "interrupted")),
        )
