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
    NodeDiedError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    RuntimeEnvSetupError,
    WorkerCrashedError,
)

from rlhf_core.errors import DeadlineError, InterruptedRun, RlhfError, first_line

from .runtime_env import WHERE as RUNTIME_ENV

logger = logging.getLogger("rlhf.ray")

T = TypeVar("T")

COORDINATOR = "coordinator"
"""Name of the coordinator in errors."""
ANSWER_SECONDS = 60.0
"""Maximum wait for the coordinator's answer, in addition to the time for which the coordinator itself waits."""
_MIN_PAUSE_SECONDS = 0.05
_MAX_PAUSE_SECONDS = 1.0

Call = tuple[str, "ray.ObjectRef[Any]"]
"""Name of the called actor and the reference to its pending answer."""


class ActorLostError(RlhfError):
    """An actor's process was lost (killed, crashed, or its node was lost) or cannot be reached."""


class TrainerLostError(ActorLostError):
    """A trainer's process or node was lost, and no trainer raised an error that could be the reason."""


def ask(coordinator: Any, method: str, *arguments: Any, wait_seconds: float = 0.0) -> Any:
    """Call the coordinator, which itself waits at most `wait_seconds`, and return its answer.

    Raises:
        ActorLostError: The coordinator's process exited.
        DeadlineError: It did not answer in time.
        RlhfError: The error that the method raised.
    """
    call = (COORDINATOR, getattr(coordinator, method).remote(*arguments))
    return collect([call], timeout_seconds=wait_seconds + ANSWER_SECONDS, doing=f"to answer {method}")[0]


def collect(calls: Iterable[Call], *, timeout_seconds: float, doing: str) -> list[Any]:
    """Wait for the answers of several actors.

    Args:
        calls: Pending calls by actor name.
        timeout_seconds: Maximum wait for all answers together.
        doing: The awaited action, as in "to take a batch".

    Returns:
        The answers, in the order of the calls.

    Raises:
        ActorLostError: An actor's process was lost.
        DeadlineError: An answer did not arrive in time.
        RlhfError: The error that an actor raised, with its name added.
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
                hint=f"`ray stack` shows the code that {name!r} is running",
            ) from error
        except RayError as error:
            convert = _name_actor if isinstance(getattr(error, "cause", None), RlhfError) else explain
            raise convert(name, error) from None
    return answers


def error_of(reference: ray.ObjectRef[Any]) -> RayError | None:
    """Error that a finished call raised, None if it returned."""
    try:
        ray.get(reference, timeout=ANSWER_SECONDS)
    except RayError as error:
        return error
    return None


def explain(actor: str, error: BaseException) -> RlhfError:
    """Convert the error of an actor's call to an error that names the actor, and log the actor's traceback.

    No traceback is logged if the run was interrupted.
    """
    if isinstance(error, RayTaskError) and not isinstance(error.cause, InterruptedRun):
        # Its text is the remote traceback, with terminal colors.
        logger.error("[%s] failed:\n%s", actor, re.sub(r"\x1b\[[0-9;]*m", "", str(error)).rstrip())
    elif is_lost(error):
        logger.error("[%s] was lost: %s", actor, error)
    elif isinstance(error, RayActorError | RuntimeEnvSetupError):
        logger.error("[%s] could not be created: %s", actor, error)
    return _name_actor(actor, error)


def is_lost(error: BaseException) -> bool:
    """Whether the actor itself died. False if it raised an error, even one about the death of another actor.

    An actor that cannot be created has raised an error too, for example because a package is missing on its node.
    """
    # OutOfMemoryError: Ray's memory monitor killed it. This class and NodeDiedError are not RayActorErrors.
    lost = ActorDiedError | ActorUnavailableError | WorkerCrashedError | NodeDiedError | OutOfMemoryError
    has_raised = isinstance(error, RayTaskError) or getattr(error, "actor_init_failed", False)
    return not has_raised and isinstance(error, lost)


def first_cause(errors: dict[str, RlhfError]) -> RlhfError:
    """Find the cause among the errors of actors that failed at about the same time."""
    for kind in (ActorLostError, InterruptedRun):
        for error in errors.values():
            if isinstance(error, kind):
                return error
    # A deadline error on one rank is usually the consequence of another rank's error.
    own = [error for error in errors.values() if not isinstance(error, DeadlineError)]
    return (own or list(errors.values()))[0]


def _name_actor(actor: str, error: BaseException) -> RlhfError:
    """Convert an error to an `RlhfError` whose `where` names the actor."""
    if isinstance(error, RayTaskError):
        cause = error.cause if isinstance(error.cause, BaseException) else error
        # The only actor that actors of a run call is the coordinator.
        error = _name_actor(COORDINATOR, cause) if is_lost(cause) else cause
    if isinstance(error, InterruptedRun) or (isinstance(error, RlhfError) and actor == COORDINATOR):
        return error  # errors that the coordinator forwards already name their actor
    if isinstance(error, RlhfError):
        where = actor if error.where is None or error.where == actor else f"{actor}, {error.where}"
        return type(error)(error.message, where=where, hint=error.hint)
    if is_lost(error):
        return ActorLostError(
            f"its process exited: {_reason(error)}",
            where=actor,
            hint="SIGKILL often means that the system ran out of memory. Continue with --resume auto",
        )
    if isinstance(error, RuntimeEnvSetupError):
        problem = f"Ray cannot set up the runtime environment of {actor}: {_last_line(error)}"
        return RlhfError(problem, where=RUNTIME_ENV, hint="the log has Ray's whole message")
    if isinstance(error, RayActorError):
        problem = f"it could not be created: {_last_line(error)}"
        return RlhfError(problem, where=actor, hint="the traceback is in the log (run.log of a run)")
    return RlhfError(
        f"{type(error).__name__}: {error}", where=actor, hint="its traceback is in the log (run.log of a run)"
    )


def _last_line(error: BaseException) -> str:
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)


def _reason(error: BaseException) -> str:
    """The line of Ray's message that names the cause of an actor's death."""
    if isinstance(error, OutOfMemoryError | NodeDiedError):
        return first_line(error)  # the other lines list processes, and Ray's options
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if "cause" in line.lower() or "exit" in line.lower() or "kill" in line.lower()]
    return (causes or lines or [type(error).__name__])[-1]


def get_named_actor(name: str) -> Any | None:
    """Look up a live actor by name in this namespace (or RAY_NAMESPACE). Returns None if it does not exist."""
    try:
        return ray.get_actor(name, namespace=os.environ.get("RAY_NAMESPACE"))
    except ValueError:
        return None


def own_name() -> str:
    """Name of the actor that runs this code, its id if it is unnamed, or an empty string outside of actors."""
    if not ray.is_initialized():  # get_runtime_context would start Ray
        return ""
    context = ray.get_runtime_context()
    if context.get_actor_id() is None:
        return ""
    return context.get_actor_name() or context.get_actor_id() or ""


def node_address() -> str:
    """Address of this node in its cluster: 127.0.0.1 in a local Ray, whatever the host name resolves to."""
    node = ray.get_runtime_context().get_node_id()
    return next(str(each["NodeManagerAddress"]) for each in ray.nodes() if each["NodeID"] == node)


class NamedActors:
    """Actors by name, looked up on first use, since makers and trainers refer to each other by name."""

    def __init__(self, names: Sequence[str], *, timeout_seconds: float) -> None:
        """Store the names.

        Args:
            names: Names of the actors, which need not have started yet.
            timeout_seconds: Maximum wait for an actor of that name to start.
        """
        self.names = tuple(names)
        self._timeout_seconds = timeout_seconds
        self._handles: dict[str, Any] = {}
        self._lost: set[str] = set()
        self._lock = threading.Lock()

    def handle(self, name: str) -> Any:
        """Return the actor's handle.

        Raises:
            DeadlineError: No actor of that name started in time.
            ActorLostError: The actor was lost and no other has taken its name. Raised without a wait.
        """
        with self._lock:
            if name not in self._handles:
                self._handles[name] = self._look_up_again(name) if name in self._lost else self._wait_for(name)
            return self._handles[name]

    def add_handles(self, handles: Mapping[str, Any]) -> None:
        """Add known handles by name."""
        with self._lock:
            self._handles.update(handles)

    def mark_lost(self, name: str) -> None:
        """Record that the actor died, so that the next use looks up its name again."""
        with self._lock:
            self._handles.pop(name, None)
            self._lost.add(name)

    def forget_handles(self) -> None:
        """Forget all handles, since new actors may have taken the names between two loops or fits."""
        with self._lock:
            self._handles.clear()
            self._lost.clear()

    def call(self, method: str, *args: Any) -> list[Call]:
        """Call `method` of all actors concurrently."""
        return [(name, getattr(self.handle(name), method).remote(*args)) for name in self.names]

    def _look_up_again(self, name: str) -> Any:
        actor = get_named_actor(name)
        if actor is None:
            raise ActorLostError(f"actor {name!r} was lost", where="ray")
        self._lost.discard(name)
        return actor

    def _wait_for(self, name: str) -> Any:
        actor = wait_until(lambda: get_named_actor(name), self._timeout_seconds)
        if actor is None:
            raise DeadlineError(
                f"waited {self._timeout_seconds:g} s for an actor named {name!r}",
                where="ray",
                hint=f"start it with .options(name={name!r}) in the same namespace",
            )
        return actor


def wait_until(condition: Callable[[], T], timeout_seconds: float) -> T:
    """Poll `condition` at growing intervals until it is true or the time is up, and return its last value.

    Example:
        >>> wait_until(lambda: "ready", timeout_seconds=1.0)
        'ready'
    """
    deadline = time.monotonic() + timeout_seconds
    pause = _MIN_PAUSE_SECONDS
    while not (value := condition()) and (remaining := deadline - time.monotonic()) > 0:
        time.sleep(min(pause, remaining))
        pause = min(2 * pause, _MAX_PAUSE_SECONDS)
    return value
