"""The actors of a run: starts them and stops them together."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from rlhf_core.errors import RlhfError
from rlhf_core.training import RunRequest

from .actor_context import ActorSpec
from .calls import ask, collect
from .cluster import cluster_address
from .config import RayConfig
from .coordinator_actor import Coordinator
from .driver_files import ActorRow
from .experience_maker_holder import ExperienceMakerHolder
from .messages import Overview
from .trainer_actor import TrainerActor

logger = logging.getLogger("rlhf.ray")

_END_SECONDS = 15.0
"""How long makers may take to end by themselves once the run is over."""


@dataclass(slots=True)
class Maker:
    """A maker, and how often it was restarted."""

    name: str
    """Never given to another of this session."""
    index: int
    """Number among those that are there; one that comes takes that of one that went."""
    actor: Any = None
    started: Any = None
    """Reference to the result of a call that is answered as soon as it runs."""
    work: Any = None
    """Reference to the result of its `work`."""
    attempt: int = 0
    failures: int = 0
    """Restarts that count towards `max_restarts`."""
    is_added: bool = False
    """Whether the run did not start with it."""

    @property
    def id(self) -> str:
        """Name at the coordinator; each restart gets a new one."""
        return self.name if self.attempt == 0 else f"{self.name}.{self.attempt}"


@dataclass(slots=True)
class Trainer:
    """A trainer and where it runs."""

    name: str
    actor: Any
    node: str
    address: str
    port: int


def near_driver() -> dict[str, Any]:
    """Options of an actor the run cannot lose: on the driver's node, so the run survives the loss of any other."""
    node = ray.get_runtime_context().get_node_id()
    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=node, soft=True)}


def room(num_cpus: float, num_gpus: float) -> str:
    """Text on what actors reserve together, and what there is."""
    there, free = ray.cluster_resources(), ray.available_resources()
    have = ", ".join(f"{there.get(kind, 0):g} {kind} ({free.get(kind, 0):g} free)" for kind in ("CPU", "GPU"))
    nodes = sum(bool(node["Alive"]) for node in ray.nodes())
    return f"they reserve {num_cpus:g} CPU and {num_gpus:g} GPU together, the {nodes} nodes of the cluster have {have}"


@dataclass(slots=True)
class Actors:
    """All actors of one run, in the run's own namespace."""

    request: RunRequest
    config: RayConfig
    namespace: str
    listened: frozenset[str]
    coordinator: Any = None
    makers: list[Maker] = field(default_factory=list)
    trainers: list[Trainer] = field(default_factory=list)
    _group: Any = None
    """Placement group of the trainers, where they reserve anything."""
    _actors: list[Any] = field(default_factory=list)
    _num_named: int = 0
    """Makers that have been given a name."""

    @property
    def num_makers(self) -> int:
        """At the start; 0 where nothing is generated: training on a dataset without held-out prompts."""
        return self.config.num_makers if self.request.resolved.generates else 0

    def start(self) -> None:
        """Start every actor. Raises when there is no room for one, or it does not start."""
        config, resolved = self.config, self.request.resolved
        self.coordinator = self._started(
            ray.remote(Coordinator),
            "coordinator",
            near_driver(),
            config,
            num_makers=self.num_makers,
            num_episodes=resolved.run.train.episodes if resolved.rolls_out else 0,
            prompts_per_episode=resolved.run.train.prompts_per_episode,
            sampler=self.request.inputs.sampler() if resolved.rolls_out else None,
        )
        trainers: list[tuple[str, Any]] = []
        for index, options in enumerate(self._rooms_of_trainers()):
            name = f"trainer-{index}"
            trainers.append((name, self._started(ray.remote(TrainerActor), name, options, name, self._spec())))
        for _ in range(self.num_makers):
            self.add_maker()
        self._wait_for_all(dict(trainers))
        calls = [(name, actor.place.remote()) for name, actor in trainers]
        found = collect(calls, timeout_seconds=config.start_timeout_seconds, doing="to start")
        self.trainers = [Trainer(name, actor, *place) for (name, actor), place in zip(trainers, found, strict=True)]

    def _rooms_of_trainers(self) -> list[dict[str, Any]]:
        """Arguments of `.options(…)` for each trainer: close together."""
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
        """Return once every actor runs, whether it then works or fails. Raises `RlhfError` where there is no room."""
        config = self.config
        starts = {maker.started: maker.name for maker in self.makers}
        starts |= {actor.__ray_ready__.remote(): name for name, actor in trainers.items()}
        late = ray.wait(list(starts), num_returns=len(starts), timeout=config.start_timeout_seconds)[1]
        if late:
            names = [starts[each] for each in late]
            num_trainers = sum(name in trainers for name in names)
            num_makers = len(names) - num_trainers
            cpus = num_makers * config.maker_cpus + num_trainers * config.trainer_cpus
            gpus = num_makers * config.maker_gpus + num_trainers * config.trainer_gpus
            raise RlhfError(
                f"waited {config.start_timeout_seconds:g} s for {', '.join(names)} to start: {room(cpus, gpus)}",
                where="transport",
                hint="lower transport.maker_cpus, maker_gpus, trainer_cpus, trainer_gpus, or the number of actors",
            )

    def fit(self) -> dict[Any, str]:
        """Start training on every rank; returns references to their results."""
        first = self.trainers[0]
        on_node: dict[str, int] = {}
        fits: dict[Any, str] = {}
        resume = None if self.request.resume is None else str(self.request.resume.resolve())
        for rank, trainer in enumerate(self.trainers):
            # A trainer with a reserved GPU sees no other.
            place = 0 if self.config.trainer_gpus else on_node.get(trainer.node, 0)
            on_node[trainer.node] = on_node.get(trainer.node, 0) + 1
            group = {"rank": rank, "local_rank": place, "world_size": len(self.trainers), "master_port": first.port}
            env_info = {"master_addr": first.address, **{name: str(value) for name, value in group.items()}}
            fits[trainer.actor.fit.remote(env_info, resume)] = trainer.name
        return fits

    def add_maker(self, *, is_added: bool = False) -> None:
        """Start another maker, as soon as Ray has room for it. is_added: to a run that goes on."""
        taken = {maker.index for maker in self.makers}
        index = next(number for number in count() if number not in taken)
        maker = Maker(f"maker-{self._num_named}", index, is_added=is_added)
        self._num_named += 1
        self.makers.append(maker)
        self._start_maker(maker)

    def restart(self, maker: Maker) -> None:
        """Replace a lost maker by a new one; its prompts are made again."""
        released = self._end(maker)
        maker.attempt += 1
        logger.warning("%s is started anew; %d of its prompts will be made again", maker.name, released)
        self._start_maker(maker)

    def remove(self, maker: Maker) -> int:
        """End a maker now and give its room back; returns how many of its prompts will be made again."""
        self.makers.remove(maker)
        return self._end(maker)

    def has_no_room(self, num_makers: int) -> bool:
        """Whether so many more makers have no room in a local Ray, which does not grow; False of a cluster."""
        if cluster_address(self.config) is not None:
            return False
        free = ray.available_resources()
        wanted = {"CPU": num_makers * self.config.maker_cpus, "GPU": num_makers * self.config.maker_gpus}
        return any(amount > free.get(kind, 0) for kind, amount in wanted.items())

    def _end(self, maker: Maker) -> int:
        ray.kill(maker.actor)
        self._actors.remove(maker.actor)
        return int(ask(self.coordinator, "release", maker.id))

    def maker_rows(self, view: Overview) -> list[ActorRow]:
        """What each maker does that the run has, or is to have."""
        known = {row.name: row for row in view.makers}
        rows = []
        for maker in self.makers:
            row = known.get(maker.id) or ActorRow(name=maker.id)
            starts = not ray.wait([maker.started], timeout=0)[0]
            there = {"doing": "waits for room in the cluster, or starts"} if starts else {}
            rows.append(row.model_copy(update={"restarts": maker.attempt, **there}))
        return rows

    def finish(self) -> None:
        """Let the makers end by themselves, so that their hooks fire and their resources are closed."""
        ask(self.coordinator, "finish")
        works = [maker.work for maker in self.makers]
        late = ray.wait(works, num_returns=len(works), timeout=_END_SECONDS)[1] if works else []
        if late:
            logger.warning("%d makers did not end within %g s and are stopped", len(late), _END_SECONDS)

    def close(self) -> None:
        """Stop every actor unconditionally and release its resources."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors.clear()
        if self._group is not None:
            ray.util.remove_placement_group(self._group)
            self._group = None

    def _start_maker(self, maker: Maker) -> None:
        config = self.config
        place = {"num_cpus": config.maker_cpus, "num_gpus": config.maker_gpus}
        options = {"update_lora_weights": config.sync == "adapter", "run": self._spec(maker.index)}
        maker.actor = self._started(ExperienceMakerHolder, maker.id, place, [], None, None, **options)
        maker.started = maker.actor.__ray_ready__.remote()
        maker.work = maker.actor.work.remote()

    def _started(self, cls: Any, name: str, options: dict[str, Any], *arguments: Any, **named: Any) -> Any:
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
            listened=self.listened,
            index=index,
            num_threads=_threads(self.config),
        )


def _threads(config: RayConfig) -> int | None:
    """torch threads per actor: on a local Ray, the cores divided by the actors that work at the same time."""
    if (
        cluster_address(config) is not None
        or config.maker_cpus
        or config.trainer_cpus
        or "OMP_NUM_THREADS" in os.environ
    ):
        return None
    # Strictly on-policy, makers and trainers take turns.
    turns = (config.num_makers, config.num_trainers)
    return max(1, (os.cpu_count() or 1) // (max(turns) if config.max_staleness == 0 else sum(turns)))
