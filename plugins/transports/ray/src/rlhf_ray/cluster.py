"""Connection to Ray: a new local instance or a running cluster, and the run's namespace."""

from __future__ import annotations

import inspect
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

from rlhf_core.errors import RlhfError, UserInputError, first_line

from .calls import ActorLostError
from .config import RayConfig
from .orphan_reaper import end_processes, find_descendants, reaper
from .runtime_env import JOB_CONFIG, WHERE, init_options

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

_REPLACED = "resolve_ip_for_localhost"
"""Private function of Ray that replaces 127.0.0.1 by the machine's address (see `_keep_loopback`)."""

_INDISPENSABLE = frozenset({"gcs_server", "raylet"})
"""Programs without which a local Ray cannot start, find or replace actors."""


@dataclass(frozen=True, slots=True)
class Connection:
    """The run's namespace, and the processes of a local Ray that the run needs until it ends."""

    namespace: str
    processes: Mapping[str, psutil.Process] = field(default_factory=dict)
    """Processes by program name. Empty for a cluster, which watches its own processes."""

    def check(self) -> None:
        """Raise `ActorLostError` if one of the processes exited, while the run can still end cleanly.

        Ray's library tries for 60 s to reach a killed `gcs_server`, then ends the driver without an error.
        """
        for name, process in self.processes.items():
            if not _is_running(process):
                problem = f"the process {name} of the local Ray exited"
                raise ActorLostError(problem, where="ray", hint="continue with --resume auto")


def _is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def cluster_address(config: RayConfig) -> str | None:
    """Address of the run's Ray, None for its own local Ray. Inside a job (`ray job submit`), the job's address."""
    in_a_job = JOB_CONFIG in os.environ
    return config.address or (os.environ.get("RAY_ADDRESS") if in_a_job else None)


@contextmanager
def connect(config: RayConfig) -> Iterator[Connection]:
    """Context connected to Ray, with a namespace unique to the run.

    A Ray that was started here is stopped on exit. An existing connection of this process is used and left open.

    Raises:
        UserInputError: `runtime_env` is invalid, or cannot be applied to an existing connection.
        RlhfError: Ray cannot be started or reached.
    """
    namespace = f"rlhf-{uuid.uuid4().hex[:12]}"
    for_ray = init_options(config.runtime_env)
    if ray.is_initialized():
        if for_ray:
            raise UserInputError(
                "this process is connected to Ray already, with the runtime environment of that connection",
                where=WHERE,
                hint="pass runtime_env to your own ray.init instead, or call ray.shutdown() first",
            )
        yield Connection(namespace)
        return
    options: dict[str, Any] = {"namespace": namespace, "log_to_driver": False, "logging_level": logging.ERROR}
    options |= for_ray
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
        check_loopback_patch()
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
    """Keep Ray on 127.0.0.1. Otherwise it uses the machine's address and listens on all interfaces.

    Ray lacks an option for this, so its private function is replaced. The upper bound of `ray` in pyproject.toml exists
    for that reason.
    """
    from ray._private import services

    replaced = getattr(services, _REPLACED, None)
    if replaced is None:  # only with a cluster, see `check_loopback_patch`
        yield
        return
    setattr(services, _REPLACED, lambda host: host)
    try:
        yield
    finally:
        setattr(services, _REPLACED, replaced)


def check_loopback_patch() -> None:
    """Check that this Ray has the private function that `_keep_loopback` replaces.

    Raises:
        RlhfError: It is missing or has other parameters, so a local Ray would listen on all network interfaces.
    """
    from ray._private import services

    function = getattr(services, _REPLACED, None)
    if function is None or list(inspect.signature(function).parameters) != ["host"]:
        raise RlhfError(
            f"a local Ray {ray.__version__} would listen on all network interfaces: it does not have the function "
            f"ray._private.services.{_REPLACED}(host), which is replaced to prevent that",
            where="transport ray",
            hint="pip install --force-reinstall rlhf-ray installs a tested version of Ray. Or start Ray yourself and "
            "set transport.address",
        )


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
