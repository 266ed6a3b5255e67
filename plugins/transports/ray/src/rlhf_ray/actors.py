"""The actors of a run: places them, starts them and stops them together."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import ray

from rlhf_core.errors import ConfigError, RlhfError
from rlhf_core.training import RunRequest

from .actor_context import ActorSpec
from .calls import ask, collect
from .cluster import cluster_address
from .config import RayConfig
from .coordinator_actor import Coordinator, CoordinatorSettings
from .experience_maker_holder import ExperienceMakerHolder
from .trainer_actor import TrainerActor

logger = logging.getLogger("rlhf.ray")

_NAMED = 8
"""Most actors that an error names."""
Demands = Mapping[str, tuple[float, float]]
"""Actor name -> CPUs and GPUs that it reserves."""
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
class TrainerPlace:
    """A trainer and where it runs."""

    name: str
    actor: Any
    node: str
    address: str
    port: int
    pid: int


class Placement:
    """Room for some actors: those that reserve resources get it in one placement group, the others are anywhere."""

    def __init__(self, demands: Demands, config: RayConfig) -> None:
        self._demands = demands
        self._strategy = config.placement.upper()
        kinds = {name: {"CPU": cpus, "GPU": gpus} for name, (cpus, gpus) in demands.items() if cpus or gpus}
        self.bundles = {name: {k: v for k, v in bundle.items() if v} for name, bundle in kinds.items()}
        """Actor name -> what it reserves."""
        self._group: Any = None
        if self.bundles:
            self._group = ray.util.placement_group(list(self.bundles.values()), strategy=self._strategy)

    def __contains__(self, name: str) -> bool:
        return name in self._demands

    def __len__(self) -> int:
        return len(self._demands)

    def is_ready(self, timeout_seconds: float = 0.0) -> bool:
        """Whether the cluster has made room, within the timeout."""
        return self._group is None or bool(self._group.wait(timeout_seconds))

    def options(self, name: str) -> dict[str, Any]:
        """Arguments of `.options(…)` for the actor."""
        cpus, gpus = self._demands[name]
        options: dict[str, Any] = {"num_cpus": cpus, "num_gpus": gpus}
        if name in self.bundles:
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=list(self.bundles).index(name)
            )
        elif self._strategy == "SPREAD":
            options["scheduling_strategy"] = "SPREAD"
        return options

    def release(self) -> None:
        """Release the reserved resources."""
        if self._group is not None:
            ray.util.remove_placement_group(self._group)
            self._group = None


def places(trainers: Demands, makers: Demands, config: RayConfig) -> list[Placement]:
    """Room for a whole run. Raises `RlhfError` where there is not enough.

    A maker's room is its own, so that it can be given back alone; with `placement: spread` all share one group, since
    Ray spreads the members of a group only.
    """
    if config.placement == "spread":
        asked: list[Demands] = [{**trainers, **makers}]
    else:
        asked = [trainers, *({name: demand} for name, demand in makers.items())]
    found = [Placement(demands, config) for demands in asked]
    deadline = time.monotonic() + config.start_timeout_seconds
    if all(place.is_ready(max(0.0, deadline - time.monotonic())) for place in found):
        return found
    told = lacking(found)
    for place in found:
        place.release()
    raise RlhfError(
        f"waited {config.start_timeout_seconds:g} s for room for {told}",
        where="transport",
        hint="lower transport.maker_cpus, maker_gpus, trainer_cpus, trainer_gpus, or the number of actors",
    )


def lacking(placements: Iterable[Placement]) -> str:
    """Text on those for which there is no room: what they ask for, which is what is missing, and what there is."""
    bundles = {name: bundle for place in placements if not place.is_ready() for name, bundle in place.bundles.items()}
    asked: Counter[str] = Counter()
    for bundle in bundles.values():
        asked.update(bundle)
    there = ray.cluster_resources()
    free = ray.available_resources()
    wanted = ", ".join(f"{amount:g} {kind}" for kind, amount in asked.items())
    have = ", ".join(f"{there.get(kind, 0):g} {kind} ({free.get(kind, 0):g} free)" for kind in ("CPU", "GPU"))
    nodes = sum(bool(node["Alive"]) for node in ray.nodes())
    return f"{_listed(list(bundles))}: they ask for {wanted} together, the {nodes} nodes of the cluster have {have}"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def near_driver() -> dict[str, Any]:
    """Options of an actor the run cannot lose: on the driver's node, so the run survives the loss of any other."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    node = ray.get_runtime_context().get_node_id()
    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=node, soft=True)}


@dataclass(slots=True)
class Actors:
    """All actors of one run, in the run's own namespace."""

    request: RunRequest
    config: RayConfig
    namespace: str
    listened: frozenset[str]
    coordinator: Any = None
    makers: list[Maker] = field(default_factory=list)
    trainers: list[TrainerPlace] = field(default_factory=list)
    _places: list[Placement] = field(default_factory=list)
    _actors: list[Any] = field(default_factory=list)
    _num_named: int = 0
    """Makers that have been given a name."""

    @property
    def num_makers(self) -> int:
        """At the start; 0 where nothing is generated: training on a dataset without held-out prompts."""
        return self.config.num_makers if self.request.resolved.generates else 0

    def start(self) -> None:
        """Place and start every actor. Raises when resources are missing or an actor does not start."""
        config = self.config
        makers = [Maker(self._new_name(), index) for index in range(self.num_makers)]
        trainers = [f"trainer-{i}" for i in range(config.num_trainers)]
        of_trainers = dict.fromkeys(trainers, (config.trainer_cpus, config.trainer_gpus))
        self._places = places(of_trainers, {maker.name: self._demand for maker in makers}, config)
        self.coordinator = self._started(ray.remote(Coordinator), "coordinator", near_driver(), self._settings())
        for maker in makers:
            self.makers.append(maker)
            self._start_maker(maker)
        actors = [
            self._started(ray.remote(TrainerActor), name, self._options(name), name, self._spec()) for name in trainers
        ]
        calls = [(name, actor.place.remote()) for name, actor in zip(trainers, actors, strict=True)]
        doing = f"to start; the cluster has {ray.cluster_resources()}, free are {ray.available_resources()}"
        found = collect(calls, timeout_seconds=config.start_timeout_seconds, doing=doing)
        self.trainers = [
            TrainerPlace(name, actor, *place) for name, actor, place in zip(trainers, actors, found, strict=True)
        ]

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

    def restart(self, maker: Maker) -> None:
        """Replace a lost maker by a new one; its prompts are made again."""
        released = self._end(maker)
        maker.attempt += 1
        logger.warning("%s is started anew; %d of its prompts will be made again", maker.name, released)
        self._start_maker(maker)

    def room_for_another(self, others: Sequence[Maker]) -> tuple[Maker, Placement]:
        """A maker to be added, and the room that the cluster was asked for. others: further ones to be added."""
        taken = {maker.index for maker in (*self.makers, *others)}
        index = next(number for number in count() if number not in taken)
        maker = Maker(self._new_name(), index, is_added=True)
        return maker, Placement({maker.name: self._demand}, self.config)

    def add(self, maker: Maker, place: Placement) -> None:
        """Start a maker in the room that there is for it."""
        self._places.append(place)
        self.makers.append(maker)
        self._start_maker(maker)

    def remove(self, maker: Maker) -> int:
        """End a maker now and give its room back; returns how many of its prompts will be made again."""
        released = self._end(maker)
        if maker in self.makers:
            self.makers.remove(maker)
        for place in [each for each in self._places if maker.name in each and len(each) == 1]:
            place.release()
            self._places.remove(place)
        return released

    def _end(self, maker: Maker) -> int:
        ray.kill(maker.actor)
        self._actors.remove(maker.actor)
        return int(ask(self.coordinator, "release", maker.id))

    def finish(self, leaving: Sequence[Maker]) -> None:
        """Let the makers end by themselves, so that their hooks fire and their resources are closed."""
        ask(self.coordinator, "finish")
        works = [maker.work for maker in (*self.makers, *leaving)]
        late = ray.wait(works, num_returns=len(works), timeout=_END_SECONDS)[1] if works else []
        if late:
            logger.warning("%d makers did not end within %g s and are stopped", len(late), _END_SECONDS)

    def close(self) -> None:
        """Stop every actor unconditionally and release its resources."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors.clear()
        for place in self._places:
            place.release()
        self._places.clear()

    def _start_maker(self, maker: Maker) -> None:
        place = self._options(maker.name)
        options = {"update_lora_weights": self.config.sync == "adapter", "run": self._spec(maker.index)}
        maker.actor = self._started(ExperienceMakerHolder, maker.id, place, [], None, None, **options)
        maker.work = maker.actor.work.remote()

    @property
    def _demand(self) -> tuple[float, float]:
        """CPUs and GPUs that a maker reserves."""
        return self.config.maker_cpus, self.config.maker_gpus

    def _new_name(self) -> str:
        self._num_named += 1
        return f"maker-{self._num_named - 1}"

    def _options(self, name: str) -> dict[str, Any]:
        return next(place for place in self._places if name in place).options(name)

    def _started(self, cls: Any, name: str, options: dict[str, Any], *arguments: Any, **named: Any) -> Any:
        named_cls = cls.options(name=name, namespace=self.namespace, max_restarts=0, **options)
        self._actors.append(named_cls.remote(*arguments, **named))
        return self._actors[-1]

    def _settings(self) -> CoordinatorSettings:
        config, resolved = self.config, self.request.resolved
        train = resolved.run.train
        return CoordinatorSettings(
            num_makers=self.num_makers,
            num_episodes=train.episodes if resolved.rolls_out else 0,
            prompts_per_episode=train.prompts_per_episode,
            prompts_per_lease=config.prompts_per_lease,
            max_staleness=config.max_staleness,
            lease_seconds=config.lease_seconds,
            heartbeat_seconds=config.heartbeat_seconds,
            sampler=self.request.inputs.sampler() if resolved.rolls_out else None,
        )

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


def check(request: RunRequest, config: RayConfig) -> None:
    """Raise `ConfigError` where the run file asks for what this transport cannot do."""
    resolved = request.resolved
    if config.sync == "adapter" and resolved.run.model.lora is None:
        raise ConfigError(
            "sends only what LoRA trains, but the model has no adapter",
            where="transport.sync",
            hint="add model.lora, or set transport.sync to full or chunked",
        )
