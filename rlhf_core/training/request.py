"""Between a checked run and its loop: the run to start, the transport that runs it, what a session is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..algorithm import Algorithm
from ..config.resolve import ResolvedRun
from ..hooks.relay import HookRelay
from ..prompts.stream import PromptStream
from ..protocols import ExperienceChannel, WeightSync
from ..runfolder.folder import RunFolder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInputs:
    """What checking a run has built. The process that runs it goes on with these; another one builds its own."""

    tokenizer: PreTrainedTokenizerBase
    algorithm: Algorithm[Any, Any]
    prompts: PromptStream
    """What the run trains on, as `build.build_run_prompts` makes it."""
    eval_prompts: PromptStream | None
    """What it evaluates on, where that has a source of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """A checked run, ready to start. For `rlhf.transports`, build(config, context=None) returns a `Transport`."""

    resolved: ResolvedRun
    folder: RunFolder
    """Exists; only the process that trains as rank 0 writes into it."""
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
    """Updates made, over the whole run."""


class Transport(Protocol):
    """Runs a request to its end, and leaves nothing of its own behind however it ends."""

    def run(self, request: RunRequest) -> FitResult: ...


class Evaluator(Protocol):
    """Scores the newest published policy on held-out prompts. Collective."""

    def evaluate(self) -> Mapping[str, float]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionParts:
    """What a transport brings to the loop."""

    channel: ExperienceChannel | None
    """Where rollouts come from; None for an algorithm that is fed by a dataset."""
    prompts: PromptStream
    sync: WeightSync
    evaluator: Evaluator | None
    interrupted: Callable[[], bool]
    """Whether the user has asked the run to stop."""
