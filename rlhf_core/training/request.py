"""The request that a transport runs, and its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..config.resolve import ResolvedRun
from ..hooks.relay import HookRelay
from ..hookspecs import Action
from ..runfolder.folder import RunFolder
from ..wiring.inputs import RunInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """A checked run, ready to start."""

    resolved: ResolvedRun
    folder: RunFolder
    """The existing run folder. Only trainer rank 0 writes to it."""
    hooks: HookRelay
    inputs: RunInputs
    """Tokenizer, algorithm and prompts, built and checked in this process."""
    resume: Path | None
    """Checkpoint folder to resume from. None starts from the beginning."""
    interrupted: Callable[[], bool]
    """Whether the user has requested a stop after the current episode."""


@dataclass(frozen=True, slots=True)
class FitResult:
    """Result of a fit."""

    eval_before: float | None
    """`eval/score` before training. None without evaluation."""
    eval_after: float | None
    """`eval/score` at the end."""
    step: int
    """Number of updates of the whole run."""
    finished: Action | None = None
    """Action that ended the run before its last episode, with its origin and reason. None if all episodes ran."""


class Transport(Protocol):
    """Runs a request to its end, and releases all its resources, also after an error.

    `build(config, context=None)` of an entry point in `rlhf.transports` returns it. `rlhf train` calls `run` once in
    each process that the user or a launcher started. The transport starts further processes itself if it needs any.

    Example:
        transport = build(config, None)
        request = RunRequest(
            resolved=resolved, folder=folder, hooks=hooks, inputs=inputs, resume=None, interrupted=lambda: False
        )
        result = transport.run(request)
    """

    def run(self, request: RunRequest) -> FitResult:
        """Train to the end and return the result.

        Args:
            request: The checked run.

        Raises:
            RlhfError: The run failed or was interrupted. Resources are released.
        """
