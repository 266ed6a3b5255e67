"""Calls to actors: lookup by name, waits with deadlines, and errors that name the actor and the cause."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)

from rlhf_core.errors import DeadlineError, InterruptedRun, RlhfError

logger = logging.getLogger("rlhf.ray")

T = TypeVar("T")

ANSWER_SECONDS = 60.0
"""Longest wait for the coordinator's answer, beyond what it waits for itself."""
_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 1.0

Call = tuple[str, "ray.ObjectRef[Any]"]
"""Name of the called actor, and the reference to its pending answer."""


class ActorLostError(RlhfError):
    """An actor's process is gone (killed, crashed, its node was lost), or cannot be reached."""


def ask(coordinator: Any, method: str, *arguments: Any, wait_seconds: float = 0.0) -> Any:
    """Call the coordinator, which answers within `wait_seconds` itself. Raises its error, or that it is gone."""
    call = ("coordinator", getattr(coordinator, method).remote(*arguments))
    return collect([call], timeout_seconds=wait_seconds + ANSWER_SECONDS, doing=f"to answer {method}")[0]


def collect(calls: Iterable[Call], *, timeout_seconds: float, doing: str) -> list[Any]:
    """The answers, in order. Raises an actor's error with its name added, `ActorLostError` or `DeadlineError`.

    doing: the awaited action, as in "to take a batch".
    """
    deadline = time.monotonic() + timeout_seconds
    answers = []
    for name, reference in calls:
        try:
            answers.append(ray.get(reference, timeout=max(0.0, deadline - time.monotonic())))
        except GetTimeoutError as error:
            raise DeadlineError(
                f"waited {timeout_seconds:g} s for actor {name!r} {doing}",
                where="ray",
                hint=f"what is {name!r} doing? `ray stack` shows where it stands",
            ) from error
        except RayError as error:
            told = _told if isinstance(getattr(error, "cause", None), RlhfError) else explain
            raise told(name, error) from None
    return answers


def error_of(reference: ray.ObjectRef[Any]) -> RayError | None:
    """What a call that is over has raised; None where it has a result."""
    try:
        ray.get(reference, timeout=ANSWER_SECONDS)
    except RayError as error:
        return error
    return None


def explain(actor: str, error: BaseException) -> RlhfError:
    """Convert an actor call's error to one of this process that names the actor; logs the actor's traceback.

    No traceback is logged where the run was asked to stop.
    """
    if isinstance(error, RayTaskError) and not isinstance(error.cause, InterruptedRun):
        # Its text is the remote traceback, with terminal colours.
        logger.error("[%s] failed:\n%s", actor, re.sub(r"\x1b\[[0-9;]*m", "", str(error)).rstrip())
    elif is_lost(error):
        logger.error("[%s] is gone: %s", actor, error)
    return _told(actor, error)


def is_lost(error: BaseException) -> bool:
    """Whether the actor itself died; False where it raised, also if it raised that another actor died."""
    lost = ActorDiedError | ActorUnavailableError | WorkerCrashedError
    return not isinstance(error, RayTaskError) and isinstance(error, lost)


def first_cause(errors: dict[str, RlhfError]) -> RlhfError:
    """Among errors of actors that failed at about the same time, the one that caused the others."""
    for kind in (ActorLostError, InterruptedRun):
        for error in errors.values():
            if isinstance(error, kind):
                return error
    # A deadline error in one rank is mostly the consequence of another rank's error.
    own = [error for error in errors.values() if not isinstance(error, DeadlineError)]
    return (own or list(errors.values()))[0]


def _told(actor: str, error: BaseException) -> RlhfError:
    if isinstance(error, RayTaskError):
        cause = error.cause if isinstance(error.cause, BaseException) else error
        # Actors of a run call only the coordinator.
        error = _told("coordinator", cause) if is_lost(cause) else cause
    if isinstance(error, InterruptedRun) or (isinstance(error, RlhfError) and actor == "coordinator"):
        return error  # the coordinator forwards errors that name their actor
    if isinstance(error, RlhfError):
        where = actor if error.where is None or error.where == actor else f"{actor}, {error.where}"
        return type(error)(error.message, where=where, hint=error.hint)
    if is_lost(error):
        return ActorLostError(
            f"its process is gone: {_reason(error)}",
            where=actor,
            hint="a SIGKILL is often the system running out of memory; a run continues with --resume auto",
        )
    return RlhfError(
        f"{type(error).__name__}: {error}", where=actor, hint="its traceback is in the log: run.log of a run's folder"
    )


def _reason(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if "cause" in line.lower() or "exit" in line.lower() or "kill" in line.lower()]
    return (told or lines or [type(error).__name__])[-1]


def get_named_actor(name: str) -> Any | None:
    """The live actor of that name in this namespace (or in RAY_NAMESPACE); None where there is none."""
    try:
        return ray.get_actor(name, namespace=os.environ.get("RAY_NAMESPACE"))
    except ValueError:
        return None


def own_name() -> str:
    """Name of the actor this code runs in; its id where it has none, empty outside of an actor."""
    if not ray.is_initialized():  # asking for a context would start Ray
        return ""
    context = ray.get_runtime_context()
    if context.get_actor_id() is None:
        return ""
    return context.get_actor_name() or context.get_actor_id() or ""


def node_address() -> str:
    """Address of this node in its cluster: 127.0.0.1 in a local one, whatever the host name resolves to."""
    node = ray.get_runtime_context().get_node_id()
    return next(str(each["NodeManagerAddress"]) for each in ray.nodes() if each["NodeID"] == node)


class NamedActors:
    """Actors by name, looked up when first needed, since makers and trainers name each other."""

    def __init__(self, names: Sequence[str], *, timeout_seconds: float) -> None:
        """`timeout_seconds`: how long to wait for an actor that is not there yet."""
        self.names = tuple(names)
        self._timeout_seconds = timeout_seconds
        self._handles: dict[str, Any] = {}
        self._lost: set[str] = set()
        self._lock = threading.Lock()

    def handle(self, name: str) -> Any:
        """The actor's handle. Raises `DeadlineError` when no actor of that name appears in time.

        There is no wait for a lost actor: `ActorLostError`, unless another has taken its name.
        """
        with self._lock:
            if name not in self._handles:
                self._handles[name] = self._find_again(name) if name in self._lost else self._wait_for(name)
            return self._handles[name]

    def know(self, handles: Mapping[str, Any]) -> None:
        """Add handles that were found elsewhere."""
        with self._lock:
            self._handles.update(handles)

    def lose(self, name: str) -> None:
        """Note that the actor died: the next use looks the name up again."""
        with self._lock:
            self._handles.pop(name, None)
            self._lost.add(name)

    def look_up_again(self) -> None:
        """Forget all handles: between two loops or fits, new actors may have taken the names."""
        with self._lock:
            self._handles.clear()
            self._lost.clear()

    def call(self, method: str, *args: Any) -> list[Call]:
        """Call `method` of all actors at the same time."""
        return [(name, getattr(self.handle(name), method).remote(*args)) for name in self.names]

    def _find_again(self, name: str) -> Any:
        found = get_named_actor(name)
        if found is None:
            raise ActorLostError(f"actor {name!r} is gone", where="ray")
        self._lost.discard(name)
        return found

    def _wait_for(self, name: str) -> Any:
        found = wait_until(lambda: get_named_actor(name), self._timeout_seconds)
        if found is None:
            raise DeadlineError(
                f"waited {self._timeout_seconds:g} s for an actor named {name!r}",
                where="ray",
                hint=f"start it with .options(name={name!r}) in the same namespace",
            )
        return found


def wait_until(condition: Callable[[], T], timeout_seconds: float) -> T:
    """Poll `condition` at growing intervals until it is true, or the time is over; returns its last value."""
    deadline = time.monotonic() + timeout_seconds
    pause = _FIRST_PAUSE_SECONDS
    while not (found := condition()) and (remaining := deadline - time.monotonic()) > 0:
        time.sleep(min(pause, remaining))
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
    return found
