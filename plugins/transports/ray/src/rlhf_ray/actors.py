"""Starts and stops the actors of a run."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from rlhf_core.errors import InterruptedRun, RlhfError
from rlhf_core.training import RunRequest

from .actor_context import ActorSpec
from .calls import COORDINATOR, ActorLostError, TrainerLostError, ask, collect
from .cluster import cluster_address
from .config import RayConfig
from .coordinator_actor import Coordinator
from .driver_files import ActorRow
from .experience_maker_holder import ExperienceMakerHolder
from .messages import Overview
from .runtime_env import own_variables
from .trainer_actor import TrainerActor

logger = logging.getLogger("rlhf.ray")

_POLL_SECONDS = 0.5
_TELL_SECONDS = 30.0
"""Time after which the log names the actors that have not started and the resources they need."""
_END_SECONDS = 15.0
"""Grace period for makers to exit on their own once the run is over."""


@dataclass(slots=True)
class MakerHandle:
    """A maker and its number of restarts."""

    name: str
    """Unique within this session: never reused for another maker."""
    index: int
    """Index among the current makers. A new maker reuses the index of a removed one."""
    actor: Any = None
    started: Any = None
    """Reference to a call that returns as soon as the actor runs."""
    work: Any = None
    """Reference to the result of its `work` call."""
    attempt: int = 0
    failures: int = 0
    """Restarts that count toward `max_restarts`."""
    is_added: bool = False
    """Whether it was added after the run started."""

    @property
    def id(self) -> str:
        """Name at the coordinator, different after each restart."""
        return self.name if self.attempt == 0 else f"{self.name}.{self.attempt}"


@dataclass(slots=True)
class TrainerHandle:
    """A trainer and its location."""

    name: str
    actor: Any
    node: str
    address: str
    port: int | None
    """Port of the store through which the ranks find each other, if this trainer hosts it."""
    fit: Any = None
    """Reference to the result of its `fit` call."""


def driver_node_options() -> dict[str, Any]:
    """Options that place an indispensable actor on the driver's node, so the run survives the loss of any other."""
    node = ray.get_runtime_context().get_node_id()
    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=node, soft=True)}


def resources(num_cpus: float, num_gpus: float) -> str:
    """Describe the resources that actors reserve in total and those of the cluster."""
    total, free = ray.cluster_resources(), ray.available_resources()
    have = ", ".join(f"{total.get(kind, 0):g} {kind} ({free.get(kind, 0):g} free)" for kind in ("CPU", "GPU"))
    nodes = sum(bool(node["Alive"]) for node in ray.nodes())
    return f"they reserve {num_cpus:g} CPU and {num_gpus:g} GPU together, the {nodes} nodes of the cluster have {have}"


@dataclass(slots=True)
class Actors:
    """All actors of one run, in the run's namespace."""

    request: RunRequest
    config: RayConfig
    namespace: str
    driver_events: frozenset[str]
    trainer_restarts: int = 0
    """How often the run was continued after the loss of a trainer."""
    coordinator: Any = None
    makers: list[MakerHandle] = field(default_factory=list)
    trainers: list[TrainerHandle] = field(default_factory=list)
    _group: Any = None
    """Placement group of the trainers if they reserve resources."""
    _actors: list[Any] = field(default_factory=list)
    _num_names: int = 0
    """Number of maker names used so far."""

    @property
    def num_makers(self) -> int:
        """Makers at the start. 0 if nothing is generated: training on a dataset without held-out prompts."""
        return self.config.num_makers if self.request.resolved.generates else 0

    def start(self) -> None:
        """Start every actor.

        Raises:
            TrainerLostError: The process or node of a trainer was lost meanwhile.
            RlhfError: Resources for an actor are missing, or it does not start.
        """
        config, resolved = self.config, self.request.resolved
        self.coordinator = self._start_actor(
            ray.remote(Coordinator),
            COORDINATOR,
            driver_node_options(),
            config,
            num_makers=self.num_makers,
            num_episodes=resolved.run.train.episodes if resolved.rolls_out else 0,
            prompts_per_episode=resolved.run.train.prompts_per_episode,
            sampler=self.request.inputs.sampler() if resolved.rolls_out else None,
        )
        trainers: list[tuple[str, Any]] = []
        for index, options in enumerate(self._trainer_options()):
            name = f"trainer-{index}"
            trainers.append((name, self._start_actor(ray.remote(TrainerActor), name, options, name, self._spec())))
        for _ in range(self.num_makers):
            self.add_maker()
        self._wait_for_all(dict(trainers))
        hosts = [index == 0 and len(trainers) > 1 for index in range(len(trainers))]
        calls = [(name, actor.place.remote(host)) for (name, actor), host in zip(trainers, hosts, strict=True)]
        try:
            places = collect(calls, timeout_seconds=config.start_timeout_seconds, doing="to start")
        except ActorLostError as error:
            raise TrainerLostError(error.message, where=error.where, hint=error.hint) from error
        self.trainers = [TrainerHandle(*named, *place) for named, place in zip(trainers, places, strict=True)]

    def _trainer_options(self) -> list[dict[str, Any]]:
        """Arguments of `.options(…)` for each trainer, which place the trainers close together."""
        config = self.config
        room = {"CPU": config.trainer_cpus, "GPU": config.trainer_gpus}
        options = {"num_cpus": config.trainer_cpus, "num_gpus": config.trainer_gpus}
        if not any(room.values()):
            return [options] * config.num_trainers
        bundle = {kind: amount for kind, amount in room.items() if amount}
        self._group = ray.util.placement_group([bundle] * config.num_trainers, strategy="PACK")
        return [
            {**options, "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, index)}
            for index in range(config.num_trainers)
        ]

    def _wait_for_all(self, trainers: Mapping[str, Any]) -> None:
        """Wait until every actor runs, whether it then works or fails.

        Raises:
            InterruptedRun: The user requested a stop meanwhile. Nothing is lost, since nothing was trained yet.
            RlhfError: Resources are missing.
        """
        config = self.config
        starts = {maker.started: maker.name for maker in self.makers}
        starts |= {actor.__ray_ready__.remote(): name for name, actor in trainers.items()}
        late, begun, waited, is_told = list(starts), time.monotonic(), 0.0, False
        while late and waited < config.start_timeout_seconds:
            timeout = min(_POLL_SECONDS, config.start_timeout_seconds - waited)
            late = ray.wait(late, num_returns=len(late), timeout=timeout)[1]
            waited = time.monotonic() - begun
            if late and self.request.interrupted():
                raise InterruptedRun(
                    "stopped while its actors started, before any further training",
                    hint=f"continue with --output {self.request.folder.path} --resume auto",
                )
            if late and waited >= _TELL_SECONDS and not is_told:
                is_told = True
                logger.warning(
                    "waiting for %s, at most %g s", self._describe_start(late, starts), config.start_timeout_seconds
                )
        if late:
            raise RlhfError(
                f"waited {config.start_timeout_seconds:g} s for {self._describe_start(late, starts)}",
                where="transport",
                hint="lower transport.maker_cpus, maker_gpus, trainer_cpus, trainer_gpus, or the number of actors",
            )

    def _describe_start(self, late: Sequence[Any], starts: Mapping[Any, str]) -> str:
        config, names = self.config, [starts[each] for each in late]
        num_makers = sum(name in {maker.name for maker in self.makers} for name in names)
        num_trainers = len(names) - num_makers
        cpus = num_makers * config.maker_cpus + num_trainers * config.trainer_cpus
        gpus = num_makers * config.maker_gpus + num_trainers * config.trainer_gpus
        return f"{', '.join(names)} to start: {resources(cpus, gpus)}"

    def fit(self) -> dict[Any, str]:
        """Start training on every rank and return result reference -> trainer name."""
        first = self.trainers[0]
        store = {"master_port": str(first.port), "torchelastic_use_agent_store": "True"}  # all ranks are its clients
        on_node: dict[str, int] = {}
        resume = None if self.request.resume is None else str(self.request.resume.resolve())
        for rank, trainer in enumerate(self.trainers):
            # A trainer with a reserved GPU sees only that GPU.
            place = 0 if self.config.trainer_gpus else on_node.get(trainer.node, 0)
            on_node[trainer.node] = on_node.get(trainer.node, 0) + 1
            group = {"rank": rank, "local_rank": place, "world_size": len(self.trainers)}
            env_info = {"master_addr": first.address, **{name: str(value) for name, value in group.items()}}
            trainer.fit = trainer.actor.fit.remote(env_info | (store if len(self.trainers) > 1 else {}), resume)
        return {trainer.fit: trainer.name for trainer in self.trainers}

    def add_maker(self, *, is_added: bool = False) -> None:
        """Start another maker once Ray has resources for it. `is_added`: whether the run is already in progress."""
        taken = {maker.index for maker in self.makers}
        index = next(number for number in count() if number not in taken)
        maker = MakerHandle(f"maker-{self._num_names}", index, is_added=is_added)
        self._num_names += 1
        self.makers.append(maker)
        self._start_maker(maker)

    def restart(self, maker: MakerHandle) -> None:
        """Replace a lost maker. Its prompts are generated again."""
        released = self._end(maker)
        maker.attempt += 1
        logger.warning("%s is restarted, %d of its prompts will be generated again", maker.name, released)
        self._start_maker(maker)

    def remove(self, maker: MakerHandle) -> int:
        """Stop a maker now, free its resources, and return the number of its prompts that will be generated again."""
        self.makers.remove(maker)
        return self._end(maker)

    def lacks_room(self, num_makers: int) -> bool:
        """Whether a local Ray, which cannot grow, lacks resources for this many more makers. False for a cluster."""
        if cluster_address(self.config) is not None:
            return False
        free = ray.available_resources()
        wanted = {"CPU": num_makers * self.config.maker_cpus, "GPU": num_makers * self.config.maker_gpus}
        return any(amount > free.get(kind, 0) for kind, amount in wanted.items())

    def _end(self, maker: MakerHandle) -> int:
        ray.kill(maker.actor)
        self._actors.remove(maker.actor)
        return int(ask(self.coordinator, "release", maker.id))

    def maker_rows(self, view: Overview) -> list[ActorRow]:
        """State of each maker, including those that are still starting."""
        known = {row.name: row for row in view.makers}
        rows = []
        for maker in self.makers:
            row = known.get(maker.id) or ActorRow(name=maker.id)
            is_starting = not ray.wait([maker.started], timeout=0)[0]
            doing = {"doing": "waits for resources of the cluster, or starts"} if is_starting else {}
            rows.append(row.model_copy(update={"restarts": maker.attempt, **doing}))
        return rows

    def finish(self) -> None:
        """Wait for the makers to exit on their own, so that their hooks fire and their resources are closed."""
        ask(self.coordinator, "finish")
        works = [maker.work for maker in self.makers]
        late = ray.wait(works, num_returns=len(works), timeout=_END_SECONDS)[1] if works else []
        if late:
            logger.warning("%d makers did not exit within %g s and are stopped", len(late), _END_SECONDS)

    def close(self) -> None:
        """Stop every actor unconditionally and release its resources."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors.clear()
        if self._group is not None:
            ray.util.remove_placement_group(self._group)
            self._group = None

    def running_trainers(self) -> list[str]:
        """Names of the trainers whose process has not ended within a while after `close`."""
        fits = {trainer.fit: trainer.name for trainer in self.trainers if trainer.fit is not None}
        if not fits:
            return []
        running = ray.wait(list(fits), num_returns=len(fits), timeout=self.config.start_timeout_seconds)[1]
        return [fits[each] for each in running]

    def _start_maker(self, maker: MakerHandle) -> None:
        config = self.config
        place = {"num_cpus": config.maker_cpus, "num_gpus": config.maker_gpus}
        options = {"update_lora_weights": config.sync == "adapter", "run": self._spec(maker.index)}
        maker.actor = self._start_actor(ExperienceMakerHolder, maker.id, place, [], None, None, **options)
        maker.started = maker.actor.__ray_ready__.remote()
        maker.work = maker.actor.work.remote()

    def _start_actor(self, cls: Any, name: str, options: dict[str, Any], *arguments: Any, **named: Any) -> Any:
        named_cls = cls.options(name=name, namespace=self.namespace, max_restarts=0, **options)
        self._actors.append(named_cls.remote(*arguments, **named))
        return self._actors[-1]

    def _spec(self, index: int = 0) -> ActorSpec:
        return ActorSpec(
            run=self.request.resolved.to_mapping(),
            folder=str(self.request.folder.path.resolve()),
            host=socket.gethostname(),
            working_folder=str(Path.cwd()),
            coordinator=self.coordinator,
            driver_events=self.driver_events,
            index=index,
            variables=own_variables(self.config.runtime_env),
            trainer_restarts=self.trainer_restarts,
            num_threads=_threads(self.config),
        )


def _threads(config: RayConfig) -> int | None:
    """torch threads per actor of a run."""
    # If strictly on-policy, makers and trainers take turns.
    turns = (config.num_makers, config.num_trainers)
    reserves = config.maker_cpus or config.trainer_cpus
    return None if reserves else threads_per_actor(config, max(turns) if config.max_staleness == 0 else sum(turns))


def threads_per_actor(config: RayConfig, num_concurrent: int) -> int | None:
    """Return the torch threads of an actor: on a local Ray, the cores divided by the actors that work concurrently.

    Args:
        config: Options of the transport.
        num_concurrent: Number of actors that work concurrently.

    Returns:
        None for torch's default: on a cluster, and if actors reserve CPUs or the user has set a number.
    """
    if cluster_address(config) is not None or config.trainer_cpus or "OMP_NUM_THREADS" in os.environ:
        return None
    return max(1, (os.cpu_count() or 1) // num_concurrent)
