"""An engine that serves several callers at once, and takes new weights between two decoding steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from rlhf_core import Column
from rlhf_core.protocols import InFlightEngine, SamplingRequest
from rlhf_core.types import Completion, GenerationRequest, SamplingParams
from rlhf_models import EngineThread

from .holder_weights import StagedWeights


class SharedEngine(EngineThread):
    """A `RolloutEngine` for callers on several threads, whose requests it answers in one batch.

    Between two decoding steps it also swaps in a version that has completely arrived. After an error of the engine,
    every call raises that error. Callers wait without a deadline, since their lease has one.
    """

    def __init__(self, engine: InFlightEngine, weights: StagedWeights) -> None:
        """Start the thread of the engine.

        Args:
            engine: Engine that takes requests and weights between decoding steps.
            weights: New weights of `engine`, and of the models that are used in `run`.
        """
        self.request_options: Mapping[str, str] = getattr(engine, "request_options", {})
        self.columns: Mapping[str, Column] = getattr(engine, "columns", {})
        self.check_options: Callable[[Mapping[str, Any]], None] | None = getattr(engine, "check_options", None)
        self._weights = weights
        self._seconds = self._since = 0.0
        super().__init__(engine)

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
        """Generate as `RolloutEngine.generate`. Weights may change meanwhile. A duplicate of an open request waits."""
        answers: SimpleQueue[Future[Completion]] = SimpleQueue()
        for answer in self.ask(requests, sampling):
            answer.add_done_callback(answers.put)
        return (answers.get().result() for _ in requests)

    def take_seconds(self) -> float:
        """Seconds spent generating since the last call."""
        with self._changed:
            taken, self._seconds = self._seconds, 0.0
        return taken

    def weights_updated(self, version: int) -> None:
        """Notify the engine, on its thread, that its model has new weights."""
        self.run(lambda: self._engine.weights_updated(version))

    # The following methods run on the engine's thread.

    def _sample(self) -> None:
        with self._weights.making():
            self._since = time.perf_counter()
            super()._sample()

    def _between(self) -> Sequence[SamplingRequest]:
        with self._changed:
            self._seconds += time.perf_counter() - self._since
        self._weights.take()
        joining = super()._between()
        self._since = time.perf_counter()
        return joining

    def _failed(self, error: BaseException) -> None:
        self._end(error)
