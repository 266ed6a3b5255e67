"""Specification of a run's actors, the setup of their processes, and their heartbeat."""

from __future__ import annotations

import logging
import os
import socket
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_core.config import resolve
from rlhf_core.hooks import HookRelay, register_hooks
from rlhf_core.util import PrintableFormatter, set_up_host_memory

from .calls import own_name
from .config import RayConfig
from .event_relay import ActorHooks, ActorLogHandler, EventSender

_LAUNCHER = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
)

HEARTBEAT_SECONDS = 60.0
"""Silence after which a maker used directly is presumed dead. A run uses `transport.heartbeat_seconds`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorSpec:
    """Specification from which an actor starts. It may be sent to other machines, so it holds plain values only."""

    run: Mapping[str, Any]
    """The resolved run file."""
    folder: str
    """Run folder, which trainer rank 0 writes."""
    host: str
    """Host name of the driver's machine."""
    working_folder: str
    """Base folder of relative paths in the run file."""
    coordinator: Any
    """Handle of the coordinator."""
    driver_events: frozenset[str]
    """Hook events that the driver's hooks subscribe to."""
    index: int = 0
    """Index of this actor among those of its kind."""
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Environment variables that the actor sets itself (`own_variables`)."""
    trainer_restarts: int = 0
    """How often the run was continued after the loss of a trainer."""
    num_threads: int | None
    """torch threads if actors share cores without reserving them. None keeps torch's default."""


class ActorContext:
    """Process-wide setup of an actor: working folder, log forwarding, resolved run and hooks."""

    def __init__(self, name: str, spec: ActorSpec) -> None:
        self.name = name
        self.spec = spec
        self.sender = EventSender(name, spec.coordinator)
        # `resolve` learns the secrets among the variables, so that logs do not show them.
        prepare_environment(spec.variables, spec.working_folder)
        self._forward_log()
        self.resolved = resolve(spec.run)
        config = self.resolved.transport.config
        assert isinstance(config, RayConfig)
        self.config = config

    @property
    def cache_folder(self) -> Path:
        """Folder of the reward cache: on the driver's machine as in a local run, elsewhere one per machine.

        SQLite is safe between the processes of one machine, but not between machines over a network file system.
        """
        folder = Path(self.spec.folder) / "reward-cache"
        host = socket.gethostname()
        return folder if host == self.spec.host else folder / host

    def hooks(self) -> HookRelay:
        """Build the run's hook plugins. Events that the driver subscribes to are also sent to it."""
        relay = ActorHooks(self.sender, self.spec.driver_events)
        register_hooks(relay, self.resolved, Path(self.spec.folder))
        return relay

    def _forward_log(self) -> None:
        root = logging.getLogger()
        if not any(isinstance(handler, ActorLogHandler) for handler in root.handlers):
            root.addHandler(ActorLogHandler(self.sender))
        logging.getLogger("rlhf").setLevel(logging.DEBUG)


class Heartbeat:
    """Context that calls `beat` periodically while this process runs. A suspended process sends no heartbeat."""

    def __init__(self, beat: Callable[[], object], *, every_seconds: float) -> None:
        """Create a heartbeat, which starts when the context is entered.

        Args:
            beat: Sends one heartbeat. Its result is ignored: callers that wait for the receiver detect its loss.
            every_seconds: Interval between heartbeats.
        """
        self._beat = beat
        self._every_seconds = every_seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._beat()
            if self._stop.wait(self._every_seconds):
                return


def prepare_environment(variables: Mapping[str, str], working_folder: str) -> None:
    """Prepare an actor's environment before anything is loaded.

    Args:
        variables: Environment variables that the actor sets itself (`own_variables`).
        working_folder: Base folder of relative paths, which is used if it exists on this machine.
    """
    for key in _LAUNCHER:
        # Variables of the driver's launcher. This process has another rank.
        os.environ.pop(key, None)
    os.environ.update(variables)
    if Path(working_folder).is_dir():
        os.chdir(working_folder)


def set_up_process(env_info: Mapping[str, str] | None, *, num_threads: int | None = None) -> None:
    """Prepare an actor's process before its first tensor. Imports torch.

    Args:
        env_info: Environment of a process group: `rank`, `world_size`, `local_rank`, `master_addr`, `master_port`.
        num_threads: torch threads. None keeps the default.
    """
    for name, value in (env_info or {}).items():
        os.environ[name.upper()] = str(value)
    # Arrays from the object store are read-only. They are only copied from, never written.
    warnings.filterwarnings("ignore", message="The given NumPy array is not writ", category=UserWarning)
    set_up_host_memory()
    import torch

    if num_threads is not None:
        torch.set_num_threads(num_threads)


def show_debug_messages() -> None:
    """Print this project's DEBUG log messages to this actor's output."""
    name = own_name() or "driver"
    handler = logging.StreamHandler()
    handler.setFormatter(PrintableFormatter(f"[{name}] %(levelname)s %(name)s: %(message)s"))
    for package in ("rlhf", "rlhf_core", "rlhf_ray", "rlhf_ppo", "rlhf_hf"):
        package_logger = logging.getLogger(package)
        package_logger.setLevel(logging.DEBUG)
        if not package_logger.handlers:
            package_logger.addHandler(handler)
