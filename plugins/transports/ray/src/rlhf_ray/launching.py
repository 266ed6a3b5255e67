"""Calls a function as each rank of a process group, on the nodes of a cluster, for commands that are not a run.

This process is rank 0, so that its files, ports, standard output and secrets stay on this machine. The other ranks are
actors. The counterpart for one machine is `rlhf_strategies.launch`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlhf_core.errors import DeadlineError, RlhfError, UserInputError
from rlhf_strategies import served_store

from .actor_context import prepare_environment, set_up_process
from .actors import resources, threads_per_actor
from .calls import ActorLostError, Call, collect, error_of, explain, first_cause, node_address
from .cluster import connect
from .config import RayConfig
from .runtime_env import own_variables

READ_OPTIONS = (
    "address",
    "runtime_env",
    "trainer_cpus",
    "trainer_gpus",
    "object_store_bytes",
    "start_timeout_seconds",
)
"""Options of the transport that `launch` reads. A rank reserves the resources of a trainer."""
_GPUS = "CUDA_VISIBLE_DEVICES"
_GRACE_SECONDS = 5.0
"""Time in which the other ranks may report the error that rank 0 noticed as a lost connection, and the reverse."""
_WATCH_SECONDS = 0.5
"""Interval at which the calls of the other ranks are checked."""
_END_SECONDS = 60.0
"""Maximum time for which the other ranks continue after rank 0 has ended, and the reverse."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Location of a rank."""

    node: str
    """Ray's id of the node."""
    gpus: tuple[str, ...]
    """GPUs that Ray reserved for it."""


class RankActor:
    """The process of a rank, or the reservation of resources for rank 0."""

    def __init__(self, working_folder: str, variables: Mapping[str, str], num_threads: int | None) -> None:
        prepare_environment(variables, working_folder)
        self._num_threads = num_threads

    def place(self) -> RankPlace:
        """Return the location of this process."""
        context = ray.get_runtime_context()
        return RankPlace(context.get_node_id(), tuple(context.get_accelerator_ids().get("GPU", ())))

    def call(self, env_info: Mapping[str, str], target: str, arguments: Sequence[Any]) -> None:
        """Call the function as one rank.

        Args:
            env_info: Variables of the process group (`set_up_process`).
            target: The function, as `module:attr`.
            arguments: Its arguments.
        """
        _call_as_rank(env_info, self._num_threads, target, arguments)


class RankActors:
    """The actors of one launch, in their own namespace."""

    def __init__(self, config: RayConfig, namespace: str, num_processes: int) -> None:
        """Start the actors of the ranks after the first. `wait` waits for them.

        Args:
            config: Options of the transport.
            namespace: Ray namespace of the actors.
            num_processes: Number of ranks, including rank 0 in this process.
        """
        self._config, self._num_processes = config, num_processes
        self._group: Any = None
        """Placement group, if ranks reserve resources. Its first bundle is on the node of this process."""
        self.num_threads = threads_per_actor(config, num_processes)
        specification = str(Path.cwd()), own_variables(config.runtime_env), self.num_threads
        self._actors: dict[str, Any] = {}
        """Name -> actor. With GPUs, `rank-0` is a reservation."""
        for rank, options in enumerate(self._options()):
            if rank == 0 and not config.trainer_gpus:
                continue
            name = f"rank-{rank}"
            remote = ray.remote(RankActor).options(name=name, namespace=namespace, max_restarts=0, **options)
            self._actors[name] = remote.remote(*specification)

    def _options(self) -> list[dict[str, Any]]:
        """Arguments of `.options(…)` for each rank, which place the ranks close together."""
        config = self._config
        bundle = {key: size for key, size in (("CPU", config.trainer_cpus), ("GPU", config.trainer_gpus)) if size}
        options = {"num_cpus": config.trainer_cpus, "num_gpus": config.trainer_gpus}
        if not bundle:
            return [{**options, "scheduling_strategy": "SPREAD"}] * self._num_processes
        here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
        self._group = ray.util.placement_group(
            [bundle] * self._num_processes,
            strategy="PACK",
            bundle_label_selector=[here, *({} for _ in range(1, self._num_processes))],
        )
        return [
            {**options, "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, rank)}
            for rank in range(self._num_processes)
        ]

    def wait(self) -> dict[str, RankPlace]:
        """Wait until all actors run, and return their locations by name.

        Raises:
            RlhfError: Resources are missing, or an actor does not start.
        """
        config, seconds = self._config, self._config.start_timeout_seconds
        calls = [(name, actor.place.remote()) for name, actor in self._actors.items()]
        late = ray.wait([each for _, each in calls], num_returns=len(calls), timeout=seconds)[1]
        if late:
            names = ", ".join(name for name, each in calls if each in late)
            reserved = resources(self._num_processes * config.trainer_cpus, self._num_processes * config.trainer_gpus)
            raise RlhfError(
                f"waited {seconds:g} s for {names} to start: {reserved}",
                where="transport",
                hint="lower transport.trainer_cpus, trainer_gpus or the number of processes. Rank 0 needs its share on "
                "the node of this command",
            )
        places: list[RankPlace] = collect(calls, timeout_seconds=seconds, doing="to start")
        return dict(zip(self._actors, places, strict=True))

    def call(self, env_info: Mapping[str, str], places: Mapping[str, RankPlace], request: Sequence[Any]) -> list[Call]:
        """Call the function on all ranks after the first.

        Args:
            env_info: Variables of the process group that all ranks share.
            places: Locations of the actors.
            request: Target and arguments.
        """
        calls: list[Call] = []
        on_node = {ray.get_runtime_context().get_node_id(): 1}
        for rank in range(1, self._num_processes):
            name = f"rank-{rank}"
            node = places[name].node
            # A rank with a reserved GPU sees only that GPU.
            local = 0 if self._config.trainer_gpus else on_node.get(node, 0)
            on_node[node] = on_node.get(node, 0) + 1
            own = {**env_info, "rank": str(rank), "local_rank": str(local)}
            calls.append((name, self._actors[name].call.remote(own, *request)))
        return calls

    def close(self) -> None:
        """Stop all actors and release their resources."""
        for actor in self._actors.values():
            ray.kill(actor)
        if self._group is not None:
            ray.util.remove_placement_group(self._group)


def launch(config: RayConfig, target: str, num_processes: int, arguments: Sequence[Any]) -> None:
    """Call a function as each rank, rank 0 in this process, and wait until all return. See `RayTransport.launch`."""
    check_options(config, num_processes)
    with connect(config) as connection:
        actors = RankActors(config, connection.namespace, num_processes)
        try:
            places = actors.wait()
            address = node_address()
            stores = [served_store(address, timeout=timedelta(seconds=config.start_timeout_seconds))]
            env_info = {
                "world_size": str(num_processes),
                "master_addr": address,
                "master_port": str(stores[0].port),
                "torchelastic_use_agent_store": "True",  # all ranks are clients of the store
            }
            calls = actors.call(env_info, places, (target, list(arguments)))
            own = {**env_info, "rank": "0", "local_rank": "0"}
            if "rank-0" in places:
                own[_GPUS] = ",".join(places["rank-0"].gpus)
            try:
                with _variables(own), _cleared_on_failure(stores, calls):
                    _call_as_rank(own, actors.num_threads, target, arguments)
            except Exception as error:
                if _is_of_others(error) and (cause := _cause(calls)) is not None:
                    raise cause from None
                raise
            collect(calls, timeout_seconds=_END_SECONDS, doing="to end after rank 0")
        finally:
            actors.close()


def check_options(config: RayConfig, num_processes: int) -> None:
    """Raise `UserInputError` for options that a launch would ignore, and for a single process.

    Args:
        config: Options of the transport.
        num_processes: Number of ranks.
    """
    if num_processes < 2:
        raise UserInputError(
            "a single process needs no cluster",
            where="--transport ray",
            hint="add --num-processes N, at least 2, or leave out --transport",
        )
    ignored = sorted(config.model_fields_set.difference(READ_OPTIONS, {"name"}))
    if ignored:
        raise UserInputError(
            f"{', '.join(ignored)} is for runs, and not for this command",
            where="transport",
            hint=f"it reads {', '.join(READ_OPTIONS)}. --num-processes is the number of ranks",
        )


def _call_as_rank(env_info: Mapping[str, str], num_threads: int | None, target: str, arguments: Sequence[Any]) -> None:
    """Call the function in this process. An error closes its process group, so that the other ranks do not wait."""
    set_up_process(env_info, num_threads=num_threads)
    import torch.distributed as dist

    try:
        resolve_name(target)(*arguments)
    except BaseException:
        if dist.is_initialized():
            with suppress(RuntimeError):  # the error above is the one to report
                dist.destroy_process_group()
        else:  # a group that could not be joined was counted, and the number is part of the next one's name
            dist.distributed_c10d._world.group_count = 0
        raise


@contextmanager
def _cleared_on_failure(stores: list[Any], calls: Sequence[Call]) -> Iterator[None]:
    """Context that drops the store of the rendezvous soon after a rank has failed.

    Rank 0 would wait until `strategy.timeout_seconds` for a rank that fails before it joins. Without the store, it
    fails at once.
    """
    import torch.distributed as dist

    ended = threading.Event()

    def watch() -> None:
        left = [reference for _, reference in calls]
        while left and not ended.wait(_WATCH_SECONDS):
            done, left = ray.wait(left, num_returns=len(left), timeout=0)
            if any(error_of(each) for each in done):
                # Joined ranks notice it by their connections, and read from the store which ranks are left.
                if not ended.wait(_END_SECONDS if dist.is_initialized() else _GRACE_SECONDS):
                    stores.clear()
                return

    thread = threading.Thread(target=watch, name="watch of ranks", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_GRACE_SECONDS)


def _is_of_others(error: BaseException) -> bool:
    """Whether rank 0 may have lost another rank, for which torch raises a `RuntimeError`."""
    return any(isinstance(each, DeadlineError | RuntimeError) for each in (error, error.__cause__))


def _cause(calls: Sequence[Call]) -> RlhfError | None:
    """The error of another rank that is the cause of a lost connection of rank 0. None if none of them has one."""
    references = [reference for _, reference in calls]
    done = ray.wait(references, num_returns=len(references), timeout=_GRACE_SECONDS)[0]
    errors = {name: error for name, reference in calls if reference in done and (error := error_of(reference))}
    explained = {name: explain(name, error) for name, error in errors.items()}
    own = {name: each for name, each in explained.items() if not isinstance(each, DeadlineError)}
    if not own:
        return None
    cause = first_cause(own)
    if isinstance(cause, ActorLostError):
        hint = "SIGKILL often means that the system ran out of memory. Start the command again"
        return ActorLostError(cause.message, where=cause.where, hint=hint)
    return cause


@contextmanager
def _variables(env_info: Mapping[str, str]) -> Iterator[None]:
    """Context after which the environment variables that a rank's setup changes are as before."""
    names = [name.upper() for name in env_info]
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
