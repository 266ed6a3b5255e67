"""Tracking of the makers that may still send to a detached trainer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from .actor_context import HEARTBEAT_SECONDS
from .coordinator_parts import ActorRegistry

_GRACE_SECONDS = 10.0
"""Time for which all makers must have been done before a fit gives up, since a loop may be about to start."""


class MakerPresence:
    """Tracks which makers may still send: those that are not done, silent or lost. Thread-safe."""

    def __init__(
        self,
        names: Sequence[str],
        is_alive: Callable[[str], bool],
        *,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start with the makers of these names, which need not have started yet.

        Args:
            names: Names of the makers.
            is_alive: Whether the actor of a name is alive.
            heartbeat_seconds: Maximum silence of a maker that has sent a heartbeat.
            clock: Returns the current time in seconds.
        """
        self._is_alive = is_alive
        self._lock = threading.Lock()
        self._registry = ActorRegistry(heartbeat_seconds, clock=clock)
        self._names = set(names)
        self._seen: set[str] = set()
        self._ended: dict[str, str] = {}
        """Maker -> description of the end of its last loop."""
        self._all_ended_since: float | None = None

    def start_fit(self) -> None:
        """Record that a fit starts. Loops that have ended so far may belong to an earlier fit."""
        with self._lock:
            self._all_ended_since = None

    def record_start(self, name: str) -> None:
        """Record that a maker starts a loop."""
        with self._lock:
            self._registry.forget(name)
            self._names.add(name)
            self._seen.add(name)
            self._ended.pop(name, None)

    def record_heartbeat(self, name: str) -> None:
        """Record a heartbeat. After the first one, more are expected until the loop is over."""
        with self._lock:
            self._registry.register(name)

    def record_end(self, name: str, error: str | None) -> None:
        """Record that a maker's loop is over. `error` is its failure, if any."""
        with self._lock:
            self._registry.forget(name)
            self._names.add(name)
            self._ended[name] = f"{name} is done" if error is None else f"{name} failed: {error}"

    def reason_all_ended(self) -> str | None:
        """Reason that no maker will send more samples. None while a maker may send."""
        with self._lock:
            running = self._names - self._ended.keys()
            seen, silent = set(self._seen), self._registry.stuck()
        for name in running:
            if name in silent:
                self.record_end(name, f"it {silent[name]}")
            elif self._is_alive(name):
                with self._lock:
                    self._seen.add(name)
            elif name in seen:
                self.record_end(name, "its actor was lost")
        with self._lock:
            if not self._names or self._names - self._ended.keys():
                self._all_ended_since = None
                return None
            now = time.monotonic()
            if self._all_ended_since is None:
                self._all_ended_since = now
            if now - self._all_ended_since < _GRACE_SECONDS:
                return None
            return ", ".join(self._ended[name] for name in sorted(self._ended))
