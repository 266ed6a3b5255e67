"""Trainer actor of a run: one rank of the process group, which runs core's loop on the coordinator's episodes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import ray

from rlhf_core.hooks import HookRelay
from rlhf_core.rollout import evaluation_metrics
from rlhf_core.runfolder import RunFolder
from rlhf_core.strategy import Strategy
from rlhf_core.training import FitResult, TrainerSession
from rlhf_core.types import CollectedEpisode, PhaseTimes, RolloutGroup
from rlhf_core.wiring import RunInputs, TrainerParts, build_strategy
from rlhf_strategies import served_store

from .actor_context import ActorContext, ActorSpec, Heartbeat, set_up_process
from .calls import ask, node_address
from .groups import group_from_tree, group_to_tree, with_groups
from .maker_parts import trained_names
from .messages import TakenEpisode
from .ray_sync import RunSync
from .sample_store import StoredEpisode, StoredGroup, fetch_groups, store_groups


class TrainerActor:
    """One rank. Rank 0 writes the run folder and calls the coordinator on behalf of all ranks."""

    def __init__(self, name: str, spec: ActorSpec) -> None:
        self._context = ActorContext(name, spec)
        self._coordinator = spec.coordinator
        self._config = self._context.config
        self._node = ray.get_runtime_context().get_node_id()
        self._store: Any = None
        """Store through which the ranks find each other, on one trainer."""

    def place(self, hosts_store: bool) -> tuple[str, str, int | None]:
        """Return the location of this trainer.

        Args:
            hosts_store: Whether to open the store through which the ranks find each other.

        Returns:
            Ray's id of the node, its address, and the port of the store. The store binds a free port itself and keeps
            it, so no other process can take the port in the meantime.
        """
        address = node_address()
        if not hosts_store:
            return self._node, address, None
        self._store = served_store(address, timeout=timedelta(seconds=self._config.start_timeout_seconds))
        return self._node, address, int(self._store.port)

    def fit(self, env_info: dict[str, str], resume: str | None) -> FitResult:
        """Train until the run ends (see `TrainerSession.fit`). `env_info` has the variables of the process group."""
        with ExitStack() as stack:
            every = self._config.heartbeat_seconds / 4
            alive = partial(self._coordinator.alive.remote, self._context.name, os.getpid(), self._node)
            stack.enter_context(Heartbeat(alive, every_seconds=every))
            set_up_process(env_info, num_threads=self._context.spec.num_threads)
            resolved = self._context.resolved
            strategy = build_strategy(resolved)
            stack.callback(self._context.sender.flush)
            stack.callback(strategy.teardown)
            strategy.setup()
            run = TrainerParts(RunInputs(resolved), strategy)
            if strategy.is_main:
                wait = self._config.start_timeout_seconds
                ask(self._coordinator, "wait_for_makers", wait, wait_seconds=wait)
            hooks = self._context.hooks() if strategy.is_main else HookRelay()
            folder = RunFolder(Path(self._context.spec.folder))
            channel: RayChannel | None = None
            sync = self._sync(run) if resolved.generates else None
            if sync is not None:
                channel = RayChannel(self._context, strategy, partial(self._metrics, sync))
            session = TrainerSession(
                run,
                folder,
                hooks=hooks,
                publish=(lambda version: None) if sync is None else sync.publish,
                makers=channel,
                interrupted=lambda: strategy.is_main and bool(ask(self._coordinator, "interrupted")),
            )
            return session.fit(None if resume is None else Path(resume))

    def _metrics(self, sync: RunSync) -> dict[str, float]:
        restarts = self._context.spec.trainer_restarts
        return sync.metrics() | ({"transport/trainer_restarts": float(restarts)} if restarts else {})

    def _sync(self, run: TrainerParts) -> RunSync:
        strategy = run.strategy
        trained = {role: trained_names(strategy.unwrap(each.model)) for role, each in run.trained.items()}
        return RunSync(self._coordinator, strategy, run.trained, trained, self._config)


class RayChannel:
    """`ExperienceChannel` to the coordinator of a run.

    Every rank fetches the episodes itself, and rank 0 makes all other calls.
    """

    def __init__(self, context: ActorContext, strategy: Strategy, metrics: Callable[[], Mapping[str, float]]) -> None:
        """Create the channel of one rank.

        Args:
            context: Context of this actor.
            strategy: Strategy of this rank.
            metrics: Returns additional metrics of an episode: those of the sync before it, and restarts.
        """
        resolved = context.resolved
        self._name = context.name
        self._coordinator = context.spec.coordinator
        self._timeout_seconds = context.config.episode_timeout_seconds
        self._strategy = strategy
        self._options = resolved.run.eval
        self._keeps_samples = resolved.run.logging.samples != "none"
        self._sets = resolved.evaluation_sets
        self._metrics = metrics

    def episode(self, index: int) -> CollectedEpisode:
        """Return an episode, whose samples each rank fetches. Raises `DeadlineError`, which names missing prompts."""
        started = time.perf_counter()
        wait = self._timeout_seconds
        taken: TakenEpisode = ask(self._coordinator, "take", index, wait, self._name, wait_seconds=wait)
        waited = time.perf_counter() - started
        data = StoredEpisode(
            taken.groups,
            self._strategy,
            give_back=lambda positions: ask(self._coordinator, "give_back", index, positions),
            timeout_seconds=wait,
        )
        metrics = {"transport/trainer_wait_s": waited, **taken.metrics, **self._metrics()}
        # Reported on one rank only, since throughput is summed over ranks.
        times = taken.times if self._strategy.is_main else PhaseTimes()
        return CollectedEpisode(rows=data.rows, data=data, times=times, metrics=metrics)

    def published(self, version: int) -> None:
        """Do nothing, since the sync has already notified the coordinator."""

    def state_dict(self) -> dict[str, Any]:
        """Return the coordinator's state on rank 0, the only rank that saves."""
        if not self._strategy.is_main:
            return {}
        state = ask(self._coordinator, "state")
        fetched = {key: self._fetch_open(each) for key, each in state["open"].items()}
        return with_groups({**state, "open": fetched}, group_to_tree)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the coordinator's state, on rank 0."""
        if self._strategy.is_main:

            def store(group: RolloutGroup) -> StoredGroup:
                return store_groups([group], "trainer-0", texts=self._keeps_samples)[0]

            ask(self._coordinator, "load", with_groups(state, lambda tree: store(group_from_tree(tree))))

    def _fetch_open(self, episode: Mapping[str, Any]) -> dict[str, Any]:
        """Convert an open episode to its form in a checkpoint. Lost groups become outstanding again."""
        groups, lost = fetch_groups(episode["accepted"], timeout_seconds=self._timeout_seconds)
        outstanding = sorted([*episode["outstanding"], *(group.position for group in lost)])
        return {**episode, "accepted": groups, "outstanding": outstanding}

    def evaluate(self) -> dict[str, float]:
        """Have the makers answer the held-out prompts (see `PolicyEvaluator.evaluate`). All ranks get the metrics."""
        metrics: dict[str, float] = {}

        def on_main() -> None:
            assert self._options is not None
            size, wait = self._options.batch_size, self._timeout_seconds
            rows = ask(self._coordinator, "evaluate", size, wait, wait_seconds=wait)
            metrics.update(evaluation_metrics(rows, self._sets))

        self._strategy.run_on_main(on_main)
        shared: dict[str, float] = self._strategy.broadcast_object(metrics)
        return shared

    def states(self) -> list[dict[str, Any]]:
        """Return the state of each maker as of its last samples, on rank 0, the only rank that saves."""
        states: list[dict[str, Any]] = []
        self._strategy.run_on_main(lambda: states.extend(ask(self._coordinator, "maker_states")))
        return states

    def load_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Set the state that each maker loads before its next prompts. If there are more makers, some share a state."""
        self._strategy.run_on_main(lambda: ask(self._coordinator, "give_maker_states", list(states)))
