"""Generation that requests and new weights join on the way: in this process, or in the one that vLLM has of its own.

Weights are told apart by how often they were loaded so far. vLLM keeps the keys and values of running requests when
weights change, and cannot drop cached prefixes meanwhile; a salt keeps those of older weights from later requests.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import DeadlineError
from rlhf_core.types import Completion, SamplingParams

from .start import WHERE

if TYPE_CHECKING:
    from .backend import VllmBackend
    from .process import VllmProcess

Joining = Sequence[tuple["Job", SamplingParams]]
"""The answers that join, each with its sampling parameters."""
Between = Callable[[bool], tuple[Joining, int]]
"""Told whether answers are under way: what joins them, and how often weights were loaded so far."""
_LOOK_SECONDS = 0.01
"""How long the next completion is waited for before the caller is asked again what joins."""


@dataclass(frozen=True, slots=True)
class Job:
    """One answer to sample."""

    sample_id: int
    branch: int
    prompt_ids: tuple[int, ...]
    max_tokens: int
    seed: int


@dataclass(slots=True)
class _Growing:
    """An answer whose tokens come step by step; at its end it has the form of a request of vLLM and of its output."""

    job: Job
    sampling: SamplingParams
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    loads: list[int] = field(default_factory=list)
    finish_reason: Any = None
    num_cached_tokens: int = 0

    @property
    def outputs(self) -> tuple[Any, ...]:
        return (self,)

    def take(self, request: Any, num_loads: int) -> None:
        """Take what a step brought."""
        (output,) = request.outputs
        self.loads += [num_loads] * len(output.token_ids)
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.finish_reason = output.finish_reason
        self.num_cached_tokens = request.num_cached_tokens or 0

    def completion(self) -> Completion:
        from .backend import completion_of

        return completion_of(self.job, self, self.sampling, self.loads[0], tuple(self.loads))


def fly(backend: VllmBackend, between: Between) -> Iterator[Completion]:
    """Answer what `between` gives before each step, until there is nothing.

    `policy_versions` of a completion are those numbers, one a token.
    """
    growing: dict[str, _Growing] = {}
    with backend.flying():
        try:
            while True:
                joining, num_loads = between(bool(growing))
                for job, sampling in joining:
                    each = _Growing(job, sampling)
                    growing[backend.add(job, sampling, salt=str(num_loads))] = each
                if not growing:
                    return
                for output in backend.step():
                    each = growing[output.request_id]
                    each.take(output, num_loads)
                    if output.finished:
                        del growing[output.request_id]
                        yield each.completion()
        finally:
            backend.abort([*growing])


class ProcessFlight:
    """The same, of vLLM in a process of its own (see `serve.Flight`)."""

    def __init__(self, process: VllmProcess, seconds: float) -> None:
        """seconds: longest wait for the next completion."""
        self._process = process
        self._seconds = seconds
        self._early: deque[Completion] = deque()
        self._num_open = 0
        self._since = 0.0
        """When the last completion came, or the first request was sent."""

    def completions(self, between: Between) -> Iterator[Completion]:
        """See `fly`. Raises what the process reports, or that it is gone, or `DeadlineError`."""
        process = self._process
        try:
            process.send(("fly",))
            while True:
                joining, num_loads = between(self._num_open > 0)
                if joining:
                    self._since = self._since if self._num_open else time.monotonic()
                    process.send(("add", joining, num_loads))
                    self._num_open += len(joining)
                if not self._num_open:
                    break
                yield from self._arrived()
            process.send(("land",))
            process.receive("the end of a generation", self._seconds)
        except BaseException:
            process.close()  # what it still has to say would be read as the next call's
            raise

    def hold(self) -> None:
        """Have it wait after its current step for a call of `update`, after which it goes on by itself."""
        self._process.send(("hold",))
        while (received := self._process.receive("vLLM to end a step", self._seconds))[0] != "held":
            self._early.append(received[1])

    def _arrived(self) -> Iterator[Completion]:
        if not self._early and self._process.has_message(_LOOK_SECONDS):
            self._early.append(self._process.receive("the next completion", self._seconds)[1])
        if not self._early and time.monotonic() - self._since > self._seconds:
            raise DeadlineError(
                f"waited {self._seconds:g} s for the next completion",
                where=WHERE,
                hint="raise engine.answer_timeout_seconds if it is only slow",
            )
        while self._early:
            self._num_open -= 1
            self._since = time.monotonic()
            yield self._early.popleft()
