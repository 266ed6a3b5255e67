"""`RayTransport`, the driver: starts the actors, watches them, replays their events, restarts dead makers."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from typing import Any

import ray

from rlhf_core.errors import DeadlineError, EngineLostError, RlhfError
from rlhf_core.hooks import HookRelay
from rlhf_core.training import FitResult, RunRequest, Transport

from .actors import Actors, Maker, check
from .calls import ActorLostError, ask, explain, first_cause, is_lost
from .cluster import Connection, connected
from .config import RayConfig
from .event_relay import replay
from .messages import Overview
from .status_file import StatusFile

_OF_THE_DRIVER = frozenset({"transform_config", "run_start", "run_end"})
"""Events that happen in the driver itself."""


def build(config: RayConfig, context: None) -> Transport:
    """Build the transport `ray`."""
    return RayTransport(config)


class RayTransport:
    """Runs makers and trainers as actors; this process starts and watches them and shows their events."""

    def __init__(self, config: RayConfig) -> None:
        self._config = config

    def run(self, request: RunRequest) -> FitResult:
        """Run to the end. However it ends, no actor is left, nor a Ray that was started here."""
        check(request, self._config)
        hooks = request.hooks.of_this_process()
        listened = frozenset(event for event in hooks.events if hooks.listens(event)) - _OF_THE_DRIVER
        with connected(self._config) as connection:
            actors = Actors(request, self._config, connection.namespace, listened)
            status = StatusFile(request.folder.path, ray.get_runtime_context().gcs_address, connection.namespace)
            try:
                actors.start()
                return Supervisor(actors, request, hooks, status, connection).run()
            finally:
                actors.close()
                status.remove()


logger = logging.getLogger("rlhf.ray")

_POLL_SECONDS = 0.5
_ANSWER_SECONDS = 60.0
"""Longest wait for a result that is already available."""
_GRACE_SECONDS = 2.0
"""Time after a trainer's error for the others to report theirs, which may be the cause."""


class Supervisor:
    """Supervises the actors until they end."""

    def __init__(
        self, actors: Actors, request: RunRequest, hooks: HookRelay, status: StatusFile, connection: Connection
    ) -> None:
        self._actors = actors
        self._request = request
        self._hooks = hooks
        self._status = status
        self._connection = connection
        self._told_to_stop = False

    def run(self) -> FitResult:
        """Train; returns rank 0's result. Raises what ended the run, naming the actor."""
        try:
            fits = self._actors.fit()
            while (result := self._outcome(fits)) is None:
                view = self._look(_POLL_SECONDS)
                self._pass_interrupt_on()
                self._watch_ray()
                self._watch_makers(view)
                self._watch_trainers(view, fits)
            self._look(0.0)
            self._actors.finish()
            return result
        finally:
            # Replay the actors' last events; the coordinator itself may be gone.
            with suppress(DeadlineError, ActorLostError):
                self._look(0.0)

    def _look(self, wait_seconds: float) -> Overview:
        actors = self._actors
        view: Overview = ask(actors.coordinator, "overview", wait_seconds, wait_seconds=wait_seconds)
        replay(view.events, self._hooks)
        self._status.write(view, actors)
        return view

    def _pass_interrupt_on(self) -> None:
        if self._request.interrupted() and not self._told_to_stop:
            self._told_to_stop = True
            self._actors.coordinator.interrupt.remote()

    def _watch_ray(self) -> None:
        """End the run while this process still can: nothing that is lost from here on could be replaced."""
        if program := self._connection.lost():
            raise ActorLostError(
                f"the process {program} of the local Ray is gone", where="ray", hint="continue with --resume auto"
            )

    def _outcome(self, fits: dict[Any, str]) -> FitResult | None:
        """Rank 0's result when every rank has ended, None until then. Raises what caused the first failures."""
        done, running = ray.wait(list(fits), num_returns=len(fits), timeout=0)
        errors = self._errors(done, fits)
        if errors and running:
            late, _ = ray.wait(running, num_returns=len(running), timeout=_GRACE_SECONDS)
            errors |= self._errors(late, fits)
        if errors:
            raise first_cause(errors)
        return None if running else ray.get(next(iter(fits)), timeout=_ANSWER_SECONDS)

    def _errors(self, done: list[Any], fits: dict[Any, str]) -> dict[str, RlhfError]:
        found: dict[str, RlhfError] = {}
        for reference in done:
            try:
                ray.get(reference, timeout=_ANSWER_SECONDS)
            except ray.exceptions.RayError as error:
                found[fits[reference]] = explain(fits[reference], error)
        return found

    def _watch_trainers(self, view: Overview, fits: dict[Any, str]) -> None:
        """End the run if a trainer's process is stopped: it cannot be replaced."""
        _, running = ray.wait(list(fits), num_returns=len(fits), timeout=0)
        for name in (fits[reference] for reference in running if fits[reference] in view.silent):
            raise ActorLostError(
                f"waited {view.silent[name]:.0f} s for a sign of life; the run was at policy version {view.version}, "
                f"{view.progress}",
                where=name,
                hint="was its process stopped? continue with --resume auto; one that is only slow needs a larger "
                "transport.heartbeat_seconds",
            )

    def _watch_makers(self, view: Overview) -> None:
        makers = self._actors.makers
        ended, _ = ray.wait([maker.work for maker in makers], num_returns=len(makers), timeout=0)
        for maker in makers:
            if maker.work in ended:
                self._take_end(maker)
            elif maker.id in view.stuck:
                self._replace(maker, f"it is held for dead: it {view.stuck[maker.id]}")

    def _take_end(self, maker: Maker) -> None:
        try:
            ray.get(maker.work, timeout=_ANSWER_SECONDS)
        except ray.exceptions.RayError as error:
            told = explain(maker.name, error)
            # A maker without the process that its engine generates in is no maker, and is replaced as one.
            if not is_lost(error) and not isinstance(told, EngineLostError):
                raise told from None
            self._replace(maker, told.message)
            return
        raise RlhfError("its loop ended before the run did", where=maker.name)

    def _replace(self, maker: Maker, reason: str) -> None:
        if maker.attempt >= self._actors.config.max_restarts:
            raise ActorLostError(
                f"{reason}; it was started anew {maker.attempt} times already",
                where=maker.name,
                hint="see the log for why; transport.max_restarts bounds the attempts",
            )
        logger.warning("%s: %s", maker.name, reason)
        started = time.monotonic()
        self._actors.restart(maker)
        logger.info("%s replaced in %.2f s", maker.name, time.monotonic() - started)
