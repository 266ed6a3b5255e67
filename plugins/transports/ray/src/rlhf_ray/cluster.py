"""Connection to Ray: a new local instance or a running cluster, and the run's namespace."""

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
from .orphan_reaper import end_processes, find_descendants, reaper

logger = logging.getLogger("rlhf.ray")

_RAY_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    # No idle workers: a run submits no tasks.
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    # Opt in to the new behavior, so that Ray does not warn about the old one.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}

_INDISPENSABLE = frozenset({"gcs_server", "raylet"})
"""Programs without which a local Ray cannot start, find or replace actors."""


@dataclass(frozen=True, slots=True)
class Connection:
    """The run's namespace, and the processes of a local Ray that the run needs until it ends."""

    namespace: str
    processes: Mapping[str, psutil.Process] = field(default_factory=dict)
    """Processes by program name. Empty for a cluster, which watches its own processes."""

    def lost_program(self) -> str | None:
        """Name of a program whose process exited, None while all of them run.

        Ray's library tries for 60 s to reach a killed `gcs_server`, then ends the driver without an error.
        """
        return next((name for name, process in self.processes.items() if not _is_running(process)), None)


def _is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def cluster_address(config: RayConfig) -> str | None:
    """Address of the run's Ray, None for its own local Ray. Inside a job (`ray job submit`), the job's address."""
    in_a_job = "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ
    return config.address or (os.environ.get("RAY_ADDRESS") if in_a_job else None)


@contextmanager
def connect(config: RayConfig) -> Iterator[Connection]:
    """Context connected to Ray, with a namespace unique to the run.

    A Ray that was started here is stopped on exit. An existing connection of this process is used and left open.
    """
    namespace = f"rlhf-{uuid.uuid4().hex[:12]}"
    if ray.is_initialized():
        yield Connection(namespace)
        return
    options: dict[str, Any] = {"namespace": namespace, "log_to_driver": False, "logging_level": logging.ERROR}
    address = cluster_address(config)
    if address is None:
        options["object_store_memory"] = config.object_store_bytes
    with _run_ray(address, options) as started:
        programs = {process.name(): process for process in started if _is_running(process)}
        yield Connection(namespace, {name: programs[name] for name in _INDISPENSABLE & programs.keys()})


@contextmanager
def local_ray(*, num_cpus: float | None = None, num_gpus: float | None = None) -> Iterator[None]:
    """Context with a local Ray for a script that starts actors itself.

    Ray listens on 127.0.0.1 only, and stops when the block ends or the script is killed.

    Args:
        num_cpus: CPUs that actors may reserve (bookkeeping only). None uses those of the machine.
        num_gpus: GPUs that actors may reserve (bookkeeping only). None uses those of the machine.

    Example:
        with local_ray(num_cpus=4):
            buffer = DetachedReplayBuffer(sample_batch_size=8)
    """
    with _run_ray(None, {"num_cpus": num_cpus, "num_gpus": num_gpus}):
        yield


@contextmanager
def _run_ray(address: str | None, options: dict[str, Any]) -> Iterator[set[psutil.Process]]:
    """Context connected to the Ray at `address`, or to a new local Ray, whose processes it yields."""
    if address is None:
        # Other machines must not be able to reach a local Ray (see `_keep_loopback`).
        options |= {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    this = psutil.Process()
    before = set(this.children())
    try:
        with _environment(_RAY_VARIABLES), _keep_signal_handlers(), _keep_loopback():
            _start(address, options)
    except BaseException:
        end_processes(find_descendants(set(this.children()) - before))
        raise
    started = set(this.children()) - before
    with reaper(started) if started else nullcontext():
        try:
            yield started
        finally:
            ray.shutdown()


def _start(address: str | None, options: Mapping[str, Any]) -> None:
    try:
        ray.init(address=address or "local", **options)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        problem, hint = "a local Ray cannot be started", "see Ray's session logs"
        if address is not None:
            problem, hint = f"no Ray answers at {address}", "check the address, and that its Ray has the same version"
        raise RlhfError(f"{problem}: {first_line(error)}", where="transport.address", hint=hint) from error


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for Ray's processes unless the user has set them, and restore them on exit."""
    added = {key: value for key, value in values.items() if key not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for key in added:
            os.environ.pop(key, None)


@contextmanager
def _keep_loopback() -> Iterator[None]:
    """Keep Ray on 127.0.0.1. Otherwise it uses the machine's address and listens on all interfaces."""
    from ray._private import services

    replace = getattr(services, "resolve_ip_for_localhost", None)
    if replace is None:
        logger.warning("this Ray listens on all network interfaces, protected by its authentication token only")
        yield
        return
    services.resolve_ip_for_localhost = lambda host: host
    try:
        yield
    finally:
        services.resolve_ip_for_localhost = replace


@contextmanager
def _keep_signal_handlers() -> Iterator[None]:
    """Keep our SIGTERM handler, which stops the run with a checkpoint and which Ray would replace."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
