"""One engine for callers on several threads."""

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
class _Open:
    """A request that is not answered yet."""

    request: GenerationRequest
    sampling: SamplingParams
    answer: Future[Completion] = field(default_factory=Future)

    @property
    def place(self) -> tuple[int, int]:
        return self.request.sample_id, self.request.branch

    def tell(self, found: Completion | BaseException) -> None:
        with suppress(InvalidStateError):  # canceled, or told before that the engine is closed
            if isinstance(found, BaseException):
                self.answer.set_exception(found)
            else:
                self.answer.set_result(found)


class EngineThread:
    """Answers the requests of several callers together, with one engine, on a thread.

    A request joins those that are being sampled; with an engine that takes none on the way, it waits for the next
    batch. One whose sample id and branch are open already waits for that one. An error of the engine is raised to those
    whose requests are open; a subclass may end the thread then (`_failed`), and do more before each step (`_between`).
    """

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._in_flight = isinstance(engine, InFlightEngine)
        self._changed = threading.Condition()
        self._asked: list[_Open] = []
        """Those that wait."""
        self._open: dict[tuple[int, int], _Open] = {}
        """Those that the engine samples, by sample id and branch."""
        self._works: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._ended: BaseException | None = None
        """Why nothing is answered any more."""
        self._thread = threading.Thread(target=self._drive, name="engine", daemon=True)
        self._thread.start()

    def ask(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> list[Future[Completion]]:
        """The answer of each. Cancel one that no one waits for any more: it is sampled no further."""
        asked = [_Open(request, sampling) for request in requests]
        with self._changed:
            self._check()
            self._asked += asked
            self._changed.notify_all()
        return [each.answer for each in asked]

    def run(self, work: Callable[[], T]) -> T:
        """The result of `work`, which is called on the engine's thread, between two decoding steps."""
        done: Future[T] = Future()
        with self._changed:
            self._check()
            self._works.append((work, done))
            self._changed.notify_all()
        return done.result()

    def close(self, *, join_seconds: float = 60.0) -> None:
        """Tell all who wait, end the thread after its current step, and close the engine."""
        self._end(RlhfError("the engine is closed", where="rollout"))
        self._thread.join(join_seconds)
        self._engine.close()

    def _check(self) -> None:
        if self._ended is not None:
            raise self._ended

    def _end(self, error: BaseException) -> None:
        """Raise `error` to all who wait, and to all who ask from now on."""
        with self._changed:
            self._ended = self._ended or error
            for each in (*self._asked, *self._open.values()):
                each.tell(error)
            while self._works:
                self._works.popleft()[1].set_exception(error)
            self._changed.notify_all()

    # What follows runs on the thread.

    def _drive(self) -> None:
        while self._wait():
            try:
                self._sample()
            except BaseException as error:  # an engine of a plugin may raise anything
                if self._ended is None:
                    self._failed(error)
            with self._changed:
                self._open.clear()

    def _wait(self) -> bool:
        """Wait for something to do, for as long as it takes; False: it is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._asked or self._works or self._ended)
            return self._ended is None

    def _sample(self) -> None:
        for completion in self._completions():
            with self._changed:
                self._open.pop((completion.sample_id, completion.branch)).tell(completion)
            if not self._in_flight and all(each.answer.done() for each in self._open.values()):
                return  # no one waits for the others

    def _completions(self) -> Iterator[Completion]:
        if isinstance(self._engine, InFlightEngine):
            return self._engine.generate_in_flight(self._between)
        asked = self._between()
        return self._engine.generate([request for request, _ in asked], asked[0][1]) if asked else iter(())

    def _between(self) -> Sequence[SamplingRequest]:
        """Before each step or batch: do other work, drop what no one waits for any more; the requests that join."""
        while self._works:
            work, done = self._works.popleft()
            try:
                done.set_result(work())
            except BaseException as error:  # raised to whoever asked for it
                done.set_exception(error)
        with self._changed:
            if (cancel := getattr(self._engine, "cancel", None)) is not None:
                for place in [place for place, each in self._open.items() if each.answer.done()]:
                    cancel(*place)
                    del self._open[place]
            self._check()
            return [(each.request, each.sampling) for each in self._take()]

    def _take(self) -> list[_Open]:
        """Open the requests that wait, one for each place; those of a batch are sampled as the first of them is."""
        taken: list[_Open] = []
        with self._changed:
            waiting = [each for each in self._asked if not each.answer.done()]
            self._asked = []
            for each in waiting:
                fits = self._in_flight or each.sampling == waiting[0].sampling
                if fits and self._open.setdefault(each.place, each) is each:
                    taken.append(each)
                else:
                    self._asked.append(each)
        return taken

    def _failed(self, error: BaseException) -> None:
        for each in self._open.values():
            each.tell(error)
