"""`RayTransport`: the driver, which starts and watches the actors, replays their events and restarts lost ones."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from rlhf_core.errors import DeadlineError, RlhfError
from rlhf_core.hooks import HookRelay
from rlhf_core.training import FitResult, RunRequest, Transport
from rlhf_core.util import write_json

from .actors import Actors
from .calls import (
    ANSWER_SECONDS,
    ActorLostError,
    TrainerLostError,
    ask,
    error_of,
    explain,
    first_cause,
    is_lost,
)
from .cluster import Connection, connect
from .config import RayConfig
from .driver_files import STATUS, ScaleAnswer, Status, clear_request, take_request
from .event_relay import Replay
from .fleet import Fleet
from .launching import launch
from .messages import Overview
from .trainer_restarts import TrainerRestarts

logger = logging.getLogger("rlhf.ray")

_POLL_SECONDS = 0.5
_WRITE_SECONDS = 1.0
_GRACE_SECONDS = 2.0
"""Time after a trainer's error in which the other trainers may report theirs, which may be the cause."""
_DRIVER_EVENTS = frozenset({"transform_config", "run_start", "run_end"})
"""Events that the driver itself fires."""


def build(config: RayConfig, context: None) -> Transport:
    """Create the transport `ray`."""
    return RayTransport(config)


class RayTransport:
    """Runs makers and trainers as actors, which this process starts and watches, and replays their events."""

    def __init__(self, config: RayConfig) -> None:
        self._config = config

    def run(self, request: RunRequest) -> FitResult:
        """Run until the end. In any case all actors are then stopped, and so is a Ray that was started here."""
        hooks = request.hooks.of_this_process()
        clear_request(request.folder.path)
        with connect(self._config) as connection:
            restarts = TrainerRestarts(request, self._config.trainer_restarts)
            status = StatusFile(request.folder.path, ray.get_runtime_context().gcs_address)
            try:
                while True:
                    actors = self._actors(request, connection, hooks, restarts.total)
                    try:
                        return self._run_once(actors, request, hooks, status, connection)
                    except ActorLostError as error:
                        if not restarts.allows(error):
                            raise
                        self._check_can_restart(actors, connection, error)
                        request = restarts.next_request(error)
            finally:
                status.remove()

    def launch(self, target: str, num_processes: int, *, arguments: Sequence[Any] = ()) -> None:
        """Call a function as each rank of a process group on the nodes of the cluster, and wait until all return.

        Rank 0 runs in this process, and the others are actors with the resources of a trainer. All of them have ended
        when this returns or raises. A rank finds the others through its environment, as with `rlhf_strategies.launch`.

        Args:
            target: The function, as `module:attr`, which every node can import.
            num_processes: Number of ranks, at least 2.
            arguments: Its arguments, the same for every rank.

        Raises:
            UserInputError: An option of the transport would be ignored, or there is one process.
            RlhfError: Resources are missing, or the error of the first rank that failed, with the rank in `where`.

        Example:
            RayTransport(RayConfig(trainer_gpus=1)).launch("my_module:train_shard", 4, arguments=["data.jsonl"])
        """
        launch(self._config, target, num_processes, arguments)

    def _actors(self, request: RunRequest, connection: Connection, hooks: HookRelay, restarts: int) -> Actors:
        driver_events = frozenset(event for event in hooks.events if hooks.listens(event)) - _DRIVER_EVENTS
        namespace = f"{connection.namespace}-{restarts}" if restarts else connection.namespace
        return Actors(request, self._config, namespace, driver_events, trainer_restarts=restarts)

    def _run_once(
        self, actors: Actors, request: RunRequest, hooks: HookRelay, status: StatusFile, connection: Connection
    ) -> FitResult:
        """Run with these actors until the end. They are then stopped."""
        try:
            actors.start()
            return Supervisor(actors, request, hooks, status, connection).run()
        finally:
            actors.close()

    def _check_can_restart(self, actors: Actors, connection: Connection, error: ActorLostError) -> None:
        """Raise `ActorLostError` if Ray was lost too, or if a trainer might still write to the run folder."""
        connection.check()
        if running := actors.running_trainers():
            raise ActorLostError(
                f"{error.message}. No restart: {', '.join(running)} could not be stopped within "
                f"{self._config.start_timeout_seconds:g} s, and would write to the run folder too",
                where=error.where,
                hint="check that its process has ended, then continue with --resume auto",
            ) from error


class StatusFile:
    """`ray.json`, which the driver writes about every second and removes when the run ends."""

    def __init__(self, folder: Path, address: str) -> None:
        self._path = folder / STATUS
        if self._path.exists():
            logger.warning("the previous driver of this run was killed")
        self.remove()
        self._fixed: dict[str, Any] = {
            "driver_pid": os.getpid(),
            "host": socket.gethostname(),
            "address": address,
        }
        self._written = float("-inf")

    def write(self, view: Overview, actors: Actors, scaling: ScaleAnswer | None) -> None:
        """Write the newest state, unless the last write was recent. `scaling` answers the newest request."""
        if time.monotonic() - self._written < _WRITE_SECONDS:
            return
        self._written = time.monotonic()
        status = Status(
            **self._fixed,
            namespace=actors.namespace,
            updated=time.time(),
            version=view.version,
            progress=view.progress,
            queue=view.queue,
            scaling=scaling,
            trainers=[row.model_copy(update={"restarts": actors.trainer_restarts}) for row in view.trainers],
            makers=actors.maker_rows(view),
        )
        write_json(self._path, status.model_dump())

    def remove(self) -> None:
        """Remove the file, if it exists."""
        self._path.unlink(missing_ok=True)


@dataclass
class Supervisor:
    """Supervises the actors until the run ends."""

    actors: Actors
    request: RunRequest
    hooks: HookRelay
    status: StatusFile
    connection: Connection
    _is_stopping: bool = False

    def __post_init__(self) -> None:
        self._fleet = Fleet(self.actors)
        self._replay = Replay(self.hooks)

    def run(self) -> FitResult:
        """Train and return rank 0's result. Raises the error that ended the run, which names its actor."""
        try:
            return self._run()
        except BaseException as error:
            self._replay.close(error)
            raise

    def _run(self) -> FitResult:
        try:
            fits = self.actors.fit()
            while (result := self._outcome(fits)) is None:
                view = self._poll(_POLL_SECONDS)
                self._handle_request()
                self._forward_interrupt()
                self.connection.check()
                self._watch_makers(view, fits)
                self._watch_trainers(view, fits)
            self._poll(0.0)
            self.actors.finish()
            return result
        finally:
            # Replay the actors' last events, unless the coordinator itself was lost.
            with suppress(DeadlineError, ActorLostError):
                self._poll(0.0)

    def _poll(self, wait_seconds: float) -> Overview:
        actors = self.actors
        view: Overview = ask(actors.coordinator, "overview", wait_seconds, wait_seconds=wait_seconds)
        self._replay(view.events)
        self.status.write(view, actors, self._fleet.answer)
        return view

    def _handle_request(self) -> None:
        """Handle a request of a command: `rlhf ray scale`, or `stop`, which has the effect of one or two Ctrl-C."""
        request = take_request(self.request.folder.path)
        if request is None:
            return
        if request.do == "scale":
            self._fleet.scale(request)
            return
        for _ in range(2 if request.do == "stop-now" else 1):
            signal.raise_signal(signal.SIGINT)

    def _forward_interrupt(self) -> None:
        if self.request.interrupted() and not self._is_stopping:
            self._is_stopping = True
            self.actors.coordinator.interrupt.remote()

    def _outcome(self, fits: dict[Any, str]) -> FitResult | None:
        """Rank 0's result once every rank has ended, None before. Raises the cause of the first failures."""
        done, running = ray.wait(list(fits), num_returns=len(fits), timeout=0)
        errors = self._errors(done, fits)
        if errors and running:
            late, running = ray.wait(running, num_returns=len(running), timeout=_GRACE_SECONDS)
            errors |= self._errors(late, fits)
        if errors and running and self.actors.config.trainer_restarts and all(map(_is_consequence, errors.values())):
            # Ray takes longer to notice a lost node than the other ranks, which lose their connections to it.
            late, _ = ray.wait(running, num_returns=len(running), timeout=self.actors.config.heartbeat_seconds)
            errors |= self._errors(late, fits)
            self._watch_trainers(self._poll(0.0), fits)
        if errors:
            raise self._cause(errors)
        return None if running else ray.get(next(iter(fits)), timeout=ANSWER_SECONDS)

    def _watch_makers(self, view: Overview, fits: dict[Any, str]) -> None:
        """Replace lost makers. Raises the error of a maker, unless the loss of a trainer is its cause."""
        try:
            self._fleet.step(view)
        except RlhfError:
            if self.actors.config.trainer_restarts:
                ray.wait(list(fits), timeout=_GRACE_SECONDS)
                self._outcome(fits)
            raise

    def _errors(self, done: list[Any], fits: dict[Any, str]) -> dict[str, RayError]:
        return {fits[each]: error for each in done if (error := error_of(each)) is not None}

    def _cause(self, errors: dict[str, RayError]) -> RlhfError:
        """The error that ended the run: a `TrainerLostError` if no trainer raised an error that could be its cause."""
        cause = first_cause({name: explain(name, error) for name, error in errors.items()})
        lost = [name for name, error in errors.items() if is_lost(error)]
        if lost and all(is_lost(error) or _is_consequence(error) for error in errors.values()):
            return TrainerLostError(cause.message, where=cause.where, hint=cause.hint)
        return cause

    def _watch_trainers(self, view: Overview, fits: dict[Any, str]) -> None:
        """End the run if a trainer is silent. Other actors cannot replace it."""
        _, running = ray.wait(list(fits), num_returns=len(fits), timeout=0)
        for name in (fits[reference] for reference in running if fits[reference] in view.silent):
            raise TrainerLostError(
                f"{view.silent[name]}. The run was at policy version {view.version}, {view.progress}",
                where=name,
                hint="continue with --resume auto, or raise transport.heartbeat_seconds if the trainer is only slow",
            )


def _is_consequence(error: RayError) -> bool:
    """Whether a trainer only waited in vain, usually for another rank, which was lost or is stuck."""
    return isinstance(getattr(error, "cause", None), DeadlineError)
