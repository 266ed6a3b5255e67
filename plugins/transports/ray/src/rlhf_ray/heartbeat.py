"""A trainer's sign of life. Makers give theirs by asking for weights (`weight_puller`)."""

from __future__ import annotations

import threading
from typing import Any


class Heartbeat:
    """Inside, the coordinator hears every `every_seconds` that this process runs; one that was stopped is silent."""

    def __init__(self, trainer: str, coordinator: Any, *, every_seconds: float) -> None:
        self._trainer = trainer
        self._coordinator = coordinator
        self._every_seconds = every_seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *of_an_error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            # Nothing comes back, and nobody waits: a coordinator that is gone ends the run by itself.
            self._coordinator.alive.remote(self._trainer)
            if self._stop.wait(self._every_seconds):
                return
