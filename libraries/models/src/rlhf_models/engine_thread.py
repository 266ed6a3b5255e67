"""One engine shared by callers on several threads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rlhf_core.errors import RlhfError
from rlhf_core.protocols import InFlightEngine, RolloutEngine, SamplingRequest
from rlhf_core.types import Completion, GenerationRequest, SamplingParams

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class _OpenRequest:
    """A request that is not answered yet."""

    request: GenerationRequest
    sampling: SamplingParams
    answer: Future[Completion] = field(default_factory=Future)

    @property
    def key(self) -> tuple[int, int]:
        return self.request.sample_id, self.request.branch

    def resolve(self, result: Completion | BaseException) -> None:
        with suppress(InvalidStateError):  # canceled, or already failed because the engine is closed
            if isinstance(result, BaseException):
                self.answer.set_exception(result)
            else:
                self.answer.set_result(result)


class EngineThread:
    """Thread that answers requests from several callers with one engine.

    An `InFlightEngine` takes new requests between decoding steps. With other engines a request waits for the next
    batch. A request with the sample id and branch of an open one waits until that one is answered. An engine error is
    raised to the callers whose requests are open. A subclass may then end the thread (override `_failed`), and may do
    more work before each step (override `_between`).

    Args:
        engine: the engine, which only this thread uses from now on.
    """

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._in_flight = isinstance(engine, InFlightEngine)
        self._changed = threading.Condition()
        self._waiting: list[_OpenRequest] = []
        """Requests that the engine has not received yet."""
        self._open: dict[tuple[int, int], _OpenRequest] = {}
        """Requests that the engine is sampling, by sample id and branch."""
        self._works: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._ended: BaseException | None = None
        """Why the thread no longer answers requests."""
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._thread.start()

    def ask(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> list[Future[Completion]]:
        """Return one future per request. Cancel a future that is no longer needed to stop its sampling.

        Args:
            requests: requests to answer, from any thread.
            sampling: sampling parameters of all of them.
        """
        added = [_OpenRequest(request, sampling) for request in requests]
        with self._changed:
            self._check()
            self._waiting += added
            self._changed.notify_all()
        return [each.answer for each in added]

    def run(self, work: Callable[[], T]) -> T:
        """Call `work` on the engine's thread between two decoding steps, and return its result."""
        done: Future[T] = Future()
        with self._changed:
            self._check()
            self._works.append((work, done))
            self._changed.notify_all()
        return done.result()

    def close(self, *, join_seconds: float = 60.0) -> None:
        """Fail all open requests, end the thread after its current step, and close the engine.

        Args:
            join_seconds: maximum wait for the thread to end.
        """
        self._end(RlhfError("the engine is closed", where="rollout"))
        self._thread.join(join_seconds)
        self._engine.close()

    def _check(self) -> None:
        if self._ended is not None:
            raise self._ended

    def _end(self, error: BaseException) -> None:
        """Raise `error` to all callers that wait, and on every later call."""
        with self._changed:
            self._ended = self._ended or error
            for each in (*self._waiting, *self._open.values()):
                each.resolve(error)
            while self._works:
                self._works.popleft()[1].set_exception(error)
            self._changed.notify_all()

    # The methods below run on the thread.

    def _loop(self) -> None:
        while self._wait():
            try:
                self._sample()
            except BaseException as error:  # a plugin's engine may raise any class
                if self._ended is None:
                    self._failed(error)
            with self._changed:
                self._open.clear()

    def _wait(self) -> bool:
        """Wait for work without a deadline. Returns False if the thread should end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._works or self._ended)
            return self._ended is None

    def _sample(self) -> None:
        for completion in self._completions():
            with self._changed:
                self._open.pop((completion.sample_id, completion.branch)).resolve(completion)
            if not self._in_flight and all(each.answer.done() for each in self._open.values()):
                return  # all others are canceled

    def _completions(self) -> Iterator[Completion]:
        if isinstance(self._engine, InFlightEngine):
            return self._engine.generate_in_flight(self._between)
        batch = self._between()
        return self._engine.generate([request for request, _ in batch], batch[0][1]) if batch else iter(())

    def _between(self) -> Sequence[SamplingRequest]:
        """Run queued work and drop canceled requests before a step or batch. Returns the requests that join."""
        while self._works:
            work, done = self._works.popleft()
            try:
                done.set_result(work())
            except BaseException as error:  # raised to the caller of `run`
                done.set_exception(error)
        with self._changed:
            if (cancel := getattr(self._engine, "cancel", None)) is not None:
                for key in [key for key, each in self._open.items() if each.answer.done()]:
                    cancel(*key)
                    del self._open[key]
            self._check()
            return [(each.request, each.sampling) for each in self._take()]

    def _take(self) -> list[_OpenRequest]:
        """Move waiting requests to the engine: one per sample id and branch, with equal sampling in a batch."""
        taken: list[_OpenRequest] = []
        with self._changed:
            waiting = [each for each in self._waiting if not each.answer.done()]
            self._waiting = []
            for each in waiting:
                fits = self._in_flight or each.sampling == waiting[0].sampling
                if fits and self._open.setdefault(each.key, each) is each:
                    taken.append(each)
                else:
                    self._waiting.append(each)
        return taken

    def _failed(self, error: BaseException) -> None:
        for each in self._open.values():
            each.resolve(error)
