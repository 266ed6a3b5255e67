"""`RayTransport`: a run on Ray actors, from the driver's side."""

from __future__ import annotations

import ray

from rlhf_core.training import FitResult, RunRequest, Transport

from .actors import Actors, check
from .cluster import connected
from .config import RayConfig
from .status_file import StatusFile
from .supervisor import Supervisor

_OF_THE_DRIVER = frozenset({"transform_config", "run_start", "run_end"})
"""Events that happen in the driver itself."""


def build(config: RayConfig, context: None) -> Transport:
    """What the component `ray` names."""
    return RayTransport(config)


class RayTransport:
    """Makers and trainers are actors; this process starts them, watches them and shows what they tell."""

    def __init__(self, config: RayConfig) -> None:
        self._config = config

    def run(self, request: RunRequest) -> FitResult:
        """Run to the end. Whatever the end, no actor is left, nor a Ray that was started here."""
        check(request, self._config)
        hooks = request.hooks.of_this_process()
        listened = frozenset(event for event in hooks.events if hooks.listens(event)) - _OF_THE_DRIVER
        with connected(self._config) as namespace:
            actors = Actors(request, self._config, namespace, listened)
            status = StatusFile(request.folder.path, ray.get_runtime_context().gcs_address, namespace)
            try:
                actors.start()
                return Supervisor(actors, request, hooks, status).run()
            finally:
                actors.close()
                status.remove()
