"""Connection to Ray: a new local instance or a running cluster, and the run's namespace in it."""

from __future__ import annotations

import logging
import os
import signal
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import psutil
import ray

from rlhf_core.errors import RlhfError, first_line

from .config import RayConfig
from .orphan_reaper import end, watched, with_descendants

logger = logging.getLogger("rlhf.ray")

_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    # No idle workers: a run submits no tasks.
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    # Opt in to the new behaviour, so that Ray does not warn about the old one.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}

_INDISPENSABLE = frozenset({"gcs_server", "raylet"})
"""Programs of a local Ray without which it starts, finds and replaces no actor."""


@dataclass(frozen=True, slots=True)
class Connection:
    """The run's namespace, and the processes of a local Ray that the run needs to the end."""

    namespace: str
    processes: Mapping[str, psutil.Process] = field(default_factory=dict)
    """By program. Empty for a cluster, which looks after its own."""

    def lost(self) -> str | None:
        """The program of a process that is gone, None while all of them run.

        Ray's library tries for 60 s to reach a `gcs_server` that was killed, then ends the driver without an error.
        """
        return next((name for name, process in self.processes.items() if not _runs(process)), None)


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def cluster_address(config: RayConfig) -> str | None:
    """Where the run's Ray is; None for a local one of its own. Inside of a job (`ray job submit`) it is the job's."""
    in_a_job = "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ
    return config.address or (os.environ.get("RAY_ADDRESS") if in_a_job else None)


@contextmanager
def connected(config: RayConfig) -> Iterator[Connection]:
    """Context connected to Ray, with a namespace unique to the run. A Ray started here is stopped at the end.

    An existing connection of this process is used and left open.
    """
    namespace = f"rlhf-{uuid.uuid4().hex[:12]}"
    if ray.is_initialized():
        yield Connection(namespace)
        return
    options: dict[str, Any] = {"namespace": namespace, "log_to_driver": False, "logging_level": logging.ERROR}
    address = cluster_address(config)
    if address is None:
        options["object_store_memory"] = config.object_store_bytes
    with _initialized(address, options) as started:
        programs = {process.name(): process for process in started if _runs(process)}
        yield Connection(namespace, {name: programs[name] for name in _INDISPENSABLE & programs.keys()})


@contextmanager
def local_ray(*, num_cpus: float | None = None, num_gpus: float | None = None) -> Iterator[None]:
    """Context with a Ray for a script that starts actors itself: on 127.0.0.1 only, and gone when the script ends.

    num_cpus, num_gpus: what actors may reserve, in name only; None is what the machine has.
    """
    with _initialized(None, {"num_cpus": num_cpus, "num_gpus": num_gpus}):
        yield


@contextmanager
def _initialized(address: str | None, options: dict[str, Any]) -> Iterator[set[psutil.Process]]:
    """Context connected to the Ray at `address`, or to a new local one, of which it yields the processes."""
    if address is None:
        # A local Ray must not be reachable from other machines (see `_loopback_kept`).
        options |= {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    this = psutil.Process()
    before = set(this.children())
    try:
        with _environment(_QUIET), _own_signal_handlers(), _loopback_kept():
            _start(address, options)
    except BaseException:
        end(with_descendants(set(this.children()) - before))
        raise
    started = set(this.children()) - before
    with watched(started) if started else nullcontext():
        try:
            yield started
        finally:
            ray.shutdown()


def _start(address: str | None, options: Mapping[str, Any]) -> None:
    try:
        ray.init(address=address or "local", **options)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        what, hint = "a local Ray cannot be started", "see Ray's session logs"
        if address is not None:
            what, hint = f"no Ray answers at {address}", "is the address right, and its Ray of the same version?"
        raise RlhfError(f"{what}: {first_line(error)}", where="transport.address", hint=hint) from error


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for Ray's processes unless the user has set them; restored afterwards."""
    added = {key: value for key, value in values.items() if key not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for key in added:
            os.environ.pop(key, None)


@contextmanager
def _loopback_kept() -> Iterator[None]:
    """Keep Ray on 127.0.0.1, which it would replace by the machine's address, then listening on all interfaces."""
    from ray._private import services

    replace = getattr(services, "resolve_ip_for_localhost", None)
    if replace is None:
        logger.warning("this Ray listens on all network interfaces; its authentication token is what guards it")
        yield
        return
    services.resolve_ip_for_localhost = lambda host: host
    try:
        yield
    finally:
        services.resolve_ip_for_localhost = replace


@contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Keep our SIGTERM handler, which stops the run with a checkpoint; Ray would replace it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
