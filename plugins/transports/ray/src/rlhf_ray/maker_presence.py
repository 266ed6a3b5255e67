"""Which makers may still send to a detached trainer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from .actor_context import HEARTBEAT_SECONDS
from .coordinator_parts import ActorRegistry

_GRACE_SECONDS = 10.0
"""How long all makers must have been done before a fit gives up: the next loop of one may be about to start."""


class MakerPresence:
    """Tracks which makers may still send; thread-safe. One counts until it is done, silent, or its actor is gone."""

    def __init__(
        self,
        names: Sequence[str],
        is_alive: Callable[[str], bool],
        *,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """heartbeat_seconds: longest silence of a maker that has given a sign of life."""
        self._is_alive = is_alive
        self._lock = threading.Lock()
        self._registry = ActorRegistry(heartbeat_seconds, clock=clock)
        self._names = set(names)
        self._seen: set[str] = set()
        self._ended: dict[str, str] = {}
        """Maker -> how its last loop ended."""
        self._all_ended_since: float | None = None

    def fit_begins(self) -> None:
        """Loops that ended until now may be those of an earlier fit."""
        with self._lock:
            self._all_ended_since = None

    def started(self, name: str) -> None:
        """Record that a maker starts a loop."""
        with self._lock:
            self._registry.forget(name)
            self._names.add(name)
            self._seen.add(name)
            self._ended.pop(name, None)

    def seen(self, name: str) -> None:
        """Record a heartbeat: from the first on, more are expected until the loop is over."""
        with self._lock:
            self._registry.register(name)

    def done(self, name: str, error: str | None) -> None:
        """Record that a maker's loop is over; `error` is its failure, if any."""
        with self._lock:
            self._registry.forget(name)
            self._names.add(name)
            self._ended[name] = f"{name} is done" if error is None else f"{name} failed: {error}"

    def reason_for_none(self) -> str | None:
        """Why no maker will send anything more; None while one may."""
        with self._lock:
            running = self._names - self._ended.keys()
            seen, silent = set(self._seen), self._registry.stuck()
        for name in running:
            if name in silent:
                self.done(name, f"it {silent[name]}")
            elif self._is_alive(name):
                with self._lock:
                    self._seen.add(name)
            elif name in seen:
                self.done(name, "its actor is gone")
        with self._lock:
            if not self._names or self._names - self._ended.keys():
                self._all_ended_since = None
                return None
            now = time.monotonic()
            if self._all_ended_since is None:
                self._all_ended_since = now
            if now - self._all_ended_since < _GRACE_SECONDS:
                return None
            return "; ".join(self._ended[name] for name in sorted(self._ended))
