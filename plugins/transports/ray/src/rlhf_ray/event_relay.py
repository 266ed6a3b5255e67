"""Sends hook events and log lines of actors to the driver, and replays them there.

Hooks passed as objects (progress, TensorBoard, a caller's recorder) stay in the process that created them, and receive
events with a small delay. Installed hook plugins run inside the actors.
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
_TRAINER_SPANS = frozenset({"fit", "episode", "epoch", "batch", "sync"})
"""Events of trainer 0 with a start and an end."""


class EventSender:
    """Sends this actor's events to the coordinator, in order, without waiting for it."""

    def __init__(self, actor: str, coordinator: Any) -> None:
        self.actor = actor
        self._coordinator = coordinator
        self._lock = threading.Lock()
        self._last: Any = None

    def send(self, event: Event | LogLine) -> None:
        """Send an event without waiting."""
        with self._lock:
            # Calls of an async actor may overtake one another, so each takes the result of the previous call.
            self._last = self._coordinator.report.remote(event, self._last)

    def flush(self) -> None:
        """Wait until the coordinator has received everything sent so far."""
        with self._lock:
            last = self._last
        if last is not None:
            ray.get(last, timeout=_FLUSH_SECONDS)


class ActorHooks(HookRelay):
    """Hooks of an actor's process. Events that the driver's hooks listen to are also sent to the driver."""

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
        # Ray's log of a sent message must not cause another message.
        self.addFilter(lambda record: not record.name.startswith("ray"))

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record. If that fails, logging's own handling reports it on stderr and the work continues."""
        try:
            self._sender.send(LogLine(self._sender.actor, record.levelno, self.format(record)))
        except Exception:
            self.handleError(record)


class Replay:
    """Passes the actors' events to the driver's hooks, and their log lines to its log."""

    def __init__(self, hooks: HookRelay) -> None:
        self._hooks = hooks
        self._open: list[tuple[str, Mapping[str, Any]]] = []
        """Start events of trainer 0 without their end so far: name without `_start`, and arguments."""

    def __call__(self, events: Iterable[Event | LogLine]) -> None:
        """Replay events in order. Raises the errors of the hooks."""
        for event in events:
            if isinstance(event, LogLine):
                logger.log(event.level, "[%s] %s", event.actor, event.text)
                continue
            # Sent by an actor of this run over Ray, which pickles every message itself.
            arguments: Mapping[str, Any] = pickle.loads(event.arguments)  # noqa: S301
            name, _, edge = event.name.rpartition("_")
            if edge == "start" and name in _TRAINER_SPANS:
                self._open.append((name, arguments))
            elif edge == "end" and name in (each for each, _ in self._open):
                while self._open.pop()[0] != name:
                    pass
            self._hooks.fire(event.name, **arguments)

    def close(self, error: BaseException) -> None:
        """Fire the end events that a lost trainer did not send. Hooks get `error`, as in the trainer's process."""
        while self._open:
            name, arguments = self._open.pop()
            self._hooks.fire(f"{name}_end", **arguments, error=_portable(error))


def _portable(value: Any) -> Any:
    """Return the value, but convert an error that may not unpickle to an `RlhfError` with its text."""
    if isinstance(value, BaseException) and not isinstance(value, RlhfError):
        return RlhfError(f"{type(value).__name__}: {value}")
    return value
