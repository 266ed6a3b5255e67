"""Sends hook events and log lines of actors to the driver, and replays them there.

Hooks given as objects (progress, TensorBoard, a caller's recorder) stay in the process where they were made;
installed hook plugins run inside the actors. So object hooks see events with a small delay.
"""

from __future__ import annotations

import logging
import pickle
import threading
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import ray

from rlhf_core.errors import RlhfError
from rlhf_core.hooks import HookRelay
from rlhf_core.util import PrintableFormatter

from .messages import Event, LogLine

logger = logging.getLogger("rlhf.ray")

_FLUSH_SECONDS = 30.0


class EventSender:
    """Sends this actor's events to the coordinator, in order, without waiting for it."""

    def __init__(self, actor: str, coordinator: Any) -> None:
        self.actor = actor
        self._coordinator = coordinator
        self._lock = threading.Lock()
        self._last: Any = None

    def send(self, event: Event | LogLine) -> None:
        with self._lock:
            # Calls of an async actor may overtake one another: each waits for the one before it, its argument.
            self._last = self._coordinator.report.remote(event, self._last)

    def flush(self) -> None:
        """Wait until the coordinator has received everything sent so far."""
        with self._lock:
            last = self._last
        if last is not None:
            ray.get(last, timeout=_FLUSH_SECONDS)


class ActorHooks(HookRelay):
    """The hooks of an actor's process; what those of the driver listen to is sent there afterwards."""

    def __init__(self, sender: EventSender, sent: Collection[str]) -> None:
        super().__init__()
        self._sender = sender
        self._sent = sent

    def listens(self, event: str) -> bool:
        return event in self._sent or super().listens(event)

    def fire(self, event: str, **arguments: Any) -> list[Any]:
        try:
            return super().fire(event, **arguments)
        finally:
            if event in self._sent:
                portable = {key: _portable(value) for key, value in arguments.items()}
                self._sender.send(Event(event, pickle.dumps(portable)))


class ActorLogHandler(logging.Handler):
    """Sends log records to the driver, which writes them to the run's log under the actor's name."""

    def __init__(self, sender: EventSender) -> None:
        super().__init__()
        self._sender = sender
        self.setFormatter(PrintableFormatter("%(message)s"))
        # Ray's own log about sending a message must not cause another message.
        self.addFilter(lambda record: not record.name.startswith("ray"))

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record; if that fails, work continues and logging's own handling reports it on stderr."""
        try:
            self._sender.send(LogLine(self._sender.actor, record.levelno, self.format(record)))
        except Exception:
            self.handleError(record)


def replay(events: Iterable[Event | LogLine], hooks: HookRelay) -> None:
    """In the driver: write log lines to the log, pass events to the hooks. Raises what a hook raises."""
    for event in events:
        if isinstance(event, LogLine):
            logger.log(event.level, "[%s] %s", event.actor, event.text)
        else:
            # From an actor of this run, over Ray, which pickles every message itself.
            arguments: Mapping[str, Any] = pickle.loads(event.arguments)  # noqa: S301
            hooks.fire(event.name, **arguments)


def _portable(value: Any) -> Any:
    """The value itself; errors that may not unpickle become an `RlhfError` with their text."""
    if isinstance(value, BaseException) and not isinstance(value, RlhfError):
        return RlhfError(f"{type(value).__name__}: {value}")
    return value
