"""Named actors that find each other, and their answers: every wait has a deadline, every error a name."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from rlhf_core.errors import DeadlineError, RlhfError

from .failures import ActorLostError

_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 1.0

Call = tuple[str, "ray.ObjectRef[Any]"]
"""Name of the actor that was called, and its answer to come."""


def get_named_actor(name: str) -> Any | None:
    """The living actor of that name in this namespace (or in RAY_NAMESPACE); None where there is none."""
    try:
        return ray.get_actor(name, namespace=os.environ.get("RAY_NAMESPACE"))
    except ValueError:
        return None


def own_name() -> str:
    """Name of the actor this code runs in; its id where it has none, empty outside of an actor."""
    context = ray.get_runtime_context()
    if context.get_actor_id() is None:
        return ""
    return context.get_actor_name() or context.get_actor_id() or ""


def set_environment(env_info: Mapping[str, str] | None) -> None:
    """Variables of a launcher (`rank`, `world_size`, `master_addr`, …), under the names that launchers use."""
    for name, value in (env_info or {}).items():
        os.environ[name.upper()] = str(value)


def collect(calls: Iterable[Call], *, timeout_seconds: float, doing: str) -> list[Any]:
    """The answers, in order. Raises what an actor raised, with its name on it, `ActorLostError` or `DeadlineError`.

    doing: what is waited for, as in "to take a batch".
    """
    deadline = time.monotonic() + timeout_seconds
    return [_answer(name, ref, deadline, timeout_seconds, doing) for name, ref in calls]


def _answer(name: str, ref: ray.ObjectRef[Any], deadline: float, timeout_seconds: float, doing: str) -> Any:
    try:
        return ray.get(ref, timeout=max(0.0, deadline - time.monotonic()))
    except GetTimeoutError as error:
        raise DeadlineError(
            f"waited {timeout_seconds:g} s for actor {name!r} {doing}",
            where="ray",
            hint=f"what is {name!r} doing? `ray stack` shows where it stands",
        ) from error
    except RayTaskError as error:
        raise _named(name, error) from error
    except RayActorError as error:
        raise ActorLostError(f"actor {name!r} is gone: {str(error).splitlines()[0]}", where="ray") from error


def _named(name: str, error: RayTaskError) -> RlhfError:
    """The remote error with the actor's name; its traceback stays below as the cause."""
    cause = error.cause
    if isinstance(cause, RlhfError):
        where = f"actor {name!r}" + (f", {cause.where}" if cause.where else "")
        return type(cause)(cause.message, where=where, hint=cause.hint)
    return RlhfError(f"{type(cause).__name__}: {cause}", where=f"actor {name!r}")


class NamedActors:
    """The actors of a list of names, looked up when first needed, since makers and trainers name each other."""

    def __init__(self, names: Sequence[str], *, timeout_seconds: float) -> None:
        """`timeout_seconds`: how long to wait for an actor that is not there yet."""
        self.names = tuple(names)
        self._timeout_seconds = timeout_seconds
        self._handles: dict[str, Any] = {}
        self._lost: set[str] = set()
        self._lock = threading.Lock()

    def handle(self, name: str) -> Any:
        """The actor. Raises `DeadlineError` when none of that name appears in time.

        One that was lost is not waited for: `ActorLostError`, unless another has taken its name.
        """
        with self._lock:
            if name not in self._handles:
                self._handles[name] = self._find_again(name) if name in self._lost else self._wait_for(name)
            return self._handles[name]

    def lose(self, name: str) -> None:
        """Its actor died: look the name up anew next time."""
        with self._lock:
            self._handles.pop(name, None)
            self._lost.add(name)

    def look_up_again(self) -> None:
        """Forget who has the names: between two loops or fits, others may have taken them."""
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
        found: Any = None

        def look() -> bool:
            nonlocal found
            found = get_named_actor(name)
            return found is not None

        if not wait_until(look, self._timeout_seconds):
            raise DeadlineError(
                f"waited {self._timeout_seconds:g} s for an actor named {name!r}",
                where="ray",
                hint=f"start it with .options(name={name!r}) in the same namespace",
            )
        return found


def wait_until(condition: Callable[[], bool], timeout_seconds: float) -> bool:
    """Ask again and again, ever more slowly; False when the time is over."""
    deadline = time.monotonic() + timeout_seconds
    pause = _FIRST_PAUSE_SECONDS
    while not condition():
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            return False
        time.sleep(min(pause, remaining))
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
    return True
