"""An engine that answers several callers at once, and takes new weights between two decoding steps."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, TimeoutError
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TypeVar

from rlhf_core import Column
from rlhf_core.errors import RlhfError
from rlhf_core.protocols import Asked, InFlightEngine
from rlhf_core.types import Completion, GenerationRequest, SamplingParams

from .holder_weights import StagedWeights

T = TypeVar("T")

_LOOK_SECONDS = 0.5
"""How often a caller that waits looks whether the thread lives. Its deadline is that of the lease it works for."""


@dataclass(frozen=True, slots=True)
class _Open:
    """A request that is not answered yet."""

    request: GenerationRequest
    sampling: SamplingParams
    answers: SimpleQueue[Completion]

    @property
    def place(self) -> tuple[int, int]:
        return self.request.sample_id, self.request.branch


class EngineThread:
    """A `RolloutEngine` for callers on several threads, whose requests it answers together.

    One thread computes. Between two decoding steps it swaps in a version that has arrived whole, runs what others have
    to do with the models (`run`), and takes up new requests. An error of the engine is raised to every caller.
    """

    def __init__(self, engine: InFlightEngine, weights: StagedWeights) -> None:
        """weights: of `engine`, and of the models that are used in `run`."""
        self._engine = engine
        self.request_options: Mapping[str, str] = getattr(engine, "request_options", {})
        self.columns: Mapping[str, Column] = getattr(engine, "columns", {})
        self._weights = weights
        self._changed = threading.Condition()
        self._asked: deque[_Open] = deque()
        self._open: dict[tuple[int, int], _Open] = {}
        self._works: deque[Callable[[], None]] = deque()
        self._error: BaseException | None = None
        self._closed = False
        self._seconds = self._since = 0.0
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._thread.start()

    @property
    def policy_version(self) -> int:
        return self._engine.policy_version

    @property
    def context_tokens(self) -> int | None:
        return self._engine.context_tokens

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._engine.eos_token_ids

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> Iterator[Completion]:
        """See `RolloutEngine.generate`; weights may change on the way. A request that is open already waits for it."""
        answers: SimpleQueue[Completion] = SimpleQueue()
        with self._changed:
            self._check()
            self._asked.extend(_Open(request, sampling, answers) for request in requests)
            self._changed.notify_all()
        return self._answers(answers, len(requests))

    def run(self, work: Callable[[], T]) -> T:
        """The result of `work`, which is called on the engine's thread, between two decoding steps."""
        done: Future[T] = Future()

        def call() -> None:
            try:
                done.set_result(work())
            except BaseException as error:  # raised to whoever asked for it
                done.set_exception(error)

        with self._changed:
            self._check()
            self._works.append(call)
            self._changed.notify_all()
        while True:
            try:
                return done.result(_LOOK_SECONDS)
            except TimeoutError:
                if not done.done():
                    self._look()

    def take_seconds(self) -> float:
        """Seconds spent generating since the last call."""
        with self._changed:
            taken, self._seconds = self._seconds, 0.0
        return taken

    def weights_updated(self, version: int) -> None:
        self.run(lambda: self._engine.weights_updated(version))

    def close(self) -> None:
        """End the thread after its current step, and close the engine."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(60.0)
        self._engine.close()

    def _answers(self, answers: SimpleQueue[Completion], count: int) -> Iterator[Completion]:
        for _ in range(count):
            while True:
                try:
                    yield answers.get(timeout=_LOOK_SECONDS)
                    break
                except Empty:
                    self._look()

    def _look(self) -> None:
        with self._changed:
            self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise RlhfError("the engine is closed", where="rollout")

    # What follows runs on the thread.

    def _serve(self) -> None:
        try:
            while self._wait():
                with self._weights.making():
                    self._since = time.perf_counter()
                    for completion in self._engine.generate_in_flight(self._between):
                        self._open.pop((completion.sample_id, completion.branch)).answers.put(completion)
        except _ClosedError:
            return
        except BaseException as error:  # raised by every caller
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _wait(self) -> bool:
        """Wait for something to do, for as long as it takes; False: it is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._asked or self._works or self._closed)
            return not self._closed

    def _between(self) -> list[Asked]:
        """The requests that join before the next step, once weights and other work were let in."""
        with self._changed:
            self._seconds += time.perf_counter() - self._since
        self._weights.take()
        while self._works:
            self._works.popleft()()
        joining: list[Asked] = []
        with self._changed:
            if self._closed:
                raise _ClosedError
            for _ in range(len(self._asked)):
                each = self._asked.popleft()
                if each.place in self._open:
                    self._asked.append(each)  # made again after a rollback: the one before is under way still
                else:
                    self._open[each.place] = each
                    joining.append((each.request, each.sampling))
            self._since = time.perf_counter()
        return joining


class _ClosedError(Exception):
    """Ends a generation."""
