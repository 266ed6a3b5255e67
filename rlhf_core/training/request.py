"""What a transport is given, and what it gives back."""

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
    """A checked run, ready to start. For `rlhf.transports`, build(config, context=None) returns a `Transport`."""

    resolved: ResolvedRun
    folder: RunFolder
    """The existing run folder; only trainer rank 0 writes into it."""
    hooks: HookRelay
    inputs: RunInputs
    """Tokenizer, algorithm and prompts, built and checked in this process."""
    resume: Path | None
    """The checkpoint folder to continue from."""
    interrupted: Callable[[], bool]
    """Whether the user has asked the run to stop after the current episode."""


@dataclass(frozen=True, slots=True)
class FitResult:
    """How a fit ended."""

    eval_before: float | None
    eval_after: float | None
    step: int
    """Updates of the whole run."""
    finished: Action | None = None
    """Who asked for the end, and why, where it came before the last episode."""


class Transport(Protocol):
    """Runs a request to its end, and releases all its resources however it ends."""

    def run(self, request: RunRequest) -> FitResult: ...
