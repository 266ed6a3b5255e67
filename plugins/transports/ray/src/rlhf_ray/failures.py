"""Errors of actors, told in the driver: who, what, and where the traceback is."""

from __future__ import annotations

import logging
import re

import ray

from rlhf_core.errors import DeadlineError, InterruptedRun, RlhfError

logger = logging.getLogger("rlhf.ray")


class ActorLostError(RlhfError):
    """An actor's process is gone (killed, crashed, its node was lost), or cannot be reached."""


def explain(actor: str, error: BaseException) -> RlhfError:
    """What an actor's call raised, as an error of this process that names the actor; its traceback goes to the log."""
    if isinstance(error, ray.exceptions.RayTaskError):
        # Its text is the traceback, as it was there, with terminal colours.
        logger.error("[%s] failed:\n%s", actor, re.sub(r"\x1b\[[0-9;]*m", "", str(error)).rstrip())
        cause = error.cause if isinstance(error.cause, BaseException) else error
        # The actors of a run call one other actor.
        return _named(actor, _lost("coordinator", cause) if is_lost(cause) else cause)
    if is_lost(error):
        logger.error("[%s] is gone: %s", actor, error)
        return _lost(actor, error)
    return _named(actor, error)


def is_lost(error: BaseException) -> bool:
    """Whether the actor died, rather than raised (which may be that another died, and is then of both kinds)."""
    return not isinstance(error, ray.exceptions.RayTaskError) and isinstance(
        error,
        ray.exceptions.ActorDiedError | ray.exceptions.ActorUnavailableError | ray.exceptions.WorkerCrashedError,
    )


def first_cause(errors: dict[str, RlhfError]) -> RlhfError:
    """Of what several actors failed with at about the same time, the one the others follow from."""
    for kind in (ActorLostError, InterruptedRun):
        for error in errors.values():
            if isinstance(error, kind):
                return error
    # A deadline passed in one rank is mostly what an error of another looks like from there.
    own = [error for error in errors.values() if not isinstance(error, DeadlineError)]
    return (own or list(errors.values()))[0]


def _lost(actor: str, error: BaseException) -> ActorLostError:
    return ActorLostError(
        f"its process is gone: {_reason(error)}",
        where=actor,
        hint="a SIGKILL is often the system running out of memory; continue with --resume auto",
    )


def _named(actor: str, error: BaseException) -> RlhfError:
    if isinstance(error, InterruptedRun):
        return error
    if isinstance(error, RlhfError):
        where = actor if error.where is None or error.where == actor else f"{actor}, {error.where}"
        return type(error)(error.message, where=where, hint=error.hint)
    return RlhfError(
        f"{type(error).__name__}: {error}", where=actor, hint="its traceback is in run.log of the run folder"
    )


def _reason(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if "cause" in line.lower() or "exit" in line.lower() or "kill" in line.lower()]
    return (told or lines or [type(error).__name__])[-1]
