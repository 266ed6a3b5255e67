"""`RayTransport`: the driver, which starts and watches the actors, replays their events and restarts dead makers."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from rlhf_core.errors import DeadlineError, RlhfError
from rlhf_core.hooks import HookRelay
from rlhf_core.training import FitResult, RunRequest, Transport
from rlhf_core.util import write_json

from .actors import Actors
from .calls import ANSWER_SECONDS, ActorLostError, ask, error_of, explain, first_cause
from .cluster import Connection, connect
from .config import RayConfig
from .driver_files import STATUS, ScaleAnswer, Status, clear_request, take_request
from .event_relay import replay
from .fleet import Fleet
from .messages import Overview

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
        driver_events = frozenset(event for event in hooks.events if hooks.listens(event)) - _DRIVER_EVENTS
        with connect(self._config) as connection:
            actors = Actors(request, self._config, connection.namespace, driver_events)
            status = StatusFile(request.folder.path, ray.get_runtime_context().gcs_address, connection.namespace)
            try:
                actors.start()
                return Supervisor(actors, request, hooks, status, connection).run()
            finally:
                actors.close()
                status.remove()


class StatusFile:
    """`ray.json`, which the driver writes about every second and removes when the run ends."""

    def __init__(self, folder: Path, address: str, namespace: str) -> None:
        self._path = folder / STATUS
        if self._path.exists():
            logger.warning("the previous driver of this run was killed")
        self.remove()
        self._fixed: dict[str, Any] = {
            "driver_pid": os.getpid(),
            "host": socket.gethostname(),
            "address": address,
            "namespace": namespace,
        }
        self._written = float("-inf")

    def write(self, view: Overview, actors: Actors, scaling: ScaleAnswer | None) -> None:
        """Write the newest state, unless the last write was recent. `scaling` answers the newest request."""
        if time.monotonic() - self._written < _WRITE_SECONDS:
            return
        self._written = time.monotonic()
        status = Status(
            **self._fixed,
            updated=time.time(),
            version=view.version,
            progress=view.progress,
            queue=view.queue,
            scaling=scaling,
            trainers=list(view.trainers),
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
        clear_request(self.request.folder.path)

    def run(self) -> FitResult:
        """Train and return rank 0's result. Raises the error that ended the run, which names its actor."""
        try:
            fits = self.actors.fit()
            while (result := self._outcome(fits)) is None:
                view = self._poll(_POLL_SECONDS)
                self._handle_request()
                self._forward_interrupt()
                self._watch_ray()
                self._fleet.step(view)
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
        replay(view.events, self.hooks)
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

    def _watch_ray(self) -> None:
        """End the run if a process of the local Ray exited, while it can still end cleanly."""
        if program := self.connection.lost_program():
            raise ActorLostError(
                f"the process {program} of the local Ray exited", where="ray", hint="continue with --resume auto"
            )

    def _outcome(self, fits: dict[Any, str]) -> FitResult | None:
        """Rank 0's result once every rank has ended, None before. Raises the cause of the first failures."""
        done, running = ray.wait(list(fits), num_returns=len(fits), timeout=0)
        errors = self._errors(done, fits)
        if errors and running:
            late, _ = ray.wait(running, num_returns=len(running), timeout=_GRACE_SECONDS)
            errors |= self._errors(late, fits)
        if errors:
            raise first_cause(errors)
        return None if running else ray.get(next(iter(fits)), timeout=ANSWER_SECONDS)

    def _errors(self, done: list[Any], fits: dict[Any, str]) -> dict[str, RlhfError]:
        return {fits[each]: explain(fits[each], error) for each in done if (error := error_of(each)) is not None}

    def _watch_trainers(self, view: Overview, fits: dict[Any, str]) -> None:
        """End the run if a trainer is silent, since it cannot be replaced."""
        _, running = ray.wait(list(fits), num_returns=len(fits), timeout=0)
        for name in (fits[reference] for reference in running if fits[reference] in view.silent):
            raise ActorLostError(
                f"{view.silent[name]}. The run was at policy version {view.version}, {view.progress}",
                where=name,
                hint="continue with --resume auto, or raise transport.heartbeat_seconds if the trainer is only slow",
            )
