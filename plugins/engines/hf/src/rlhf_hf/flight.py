"""A generation that requests and new weights may join on the way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from rlhf_core.protocols import SamplingRequest
from rlhf_core.types import GenerationRequest, SamplingParams

from .lockstep import LockstepBatch
from .rows import Row, Sampler, make_rows
from .slots import SlotBatch


class Flight:
    """The rows under way, in one batch as long as there are any."""

    def __init__(
        self,
        sampler: Callable[[SamplingParams], Sampler],
        batch: Callable[[deque[Row]], SlotBatch | LockstepBatch],
        context_tokens: int | None,
    ) -> None:
        """batch: a new one, for rows of those that wait. context_tokens: see `make_rows`."""
        self._new_sampler = sampler
        self._new_batch = batch
        self._context_tokens = context_tokens
        self._samplers: dict[SamplingParams, Sampler] = {}
        self._batch: SlotBatch | LockstepBatch | None = None
        self._open: set[Row] = set()
        self._waiting: deque[Row] = deque()
        """Rows that are in no batch yet."""
        self._num_rows = 0
        self._version: int | None = None

    @property
    def busy(self) -> bool:
        return bool(self._open)

    def weights_are(self, version: int) -> None:
        """Tell, before a step, which weights it is run with."""
        if version == self._version:
            return
        self._version = version
        for row in self._open:
            row.version = version
        if self._batch is not None:
            self._batch.weights_changed()

    def add(self, asked: Sequence[SamplingRequest]) -> None:
        """Answer these too. Raises `DataError` for a prompt that leaves no room for an answer."""
        assert self._version is not None
        requests: dict[SamplingParams, list[GenerationRequest]] = {}
        for request, sampling in asked:
            requests.setdefault(sampling, []).append(request)
        for sampling, together in requests.items():
            if sampling not in self._samplers:
                self._samplers[sampling] = self._new_sampler(sampling)
            rows = make_rows(together, sampling, self._context_tokens, first_key=self._num_rows)
            self._num_rows += len(rows)
            for row in rows:
                row.sampler, row.version = self._samplers[sampling], self._version
            self._open.update(rows)
            self._waiting.extend(rows)

    def cancel(self, sample_id: int, branch: int) -> None:
        """Drop an open row."""
        for row in [row for row in self._open if (row.request.sample_id, row.request.branch) == (sample_id, branch)]:
            if row in self._waiting:
                self._waiting.remove(row)
            elif self._batch is not None:
                self._batch.drop(row)
            self._close([row])

    def step(self) -> list[Row]:
        """Run one pass; return the rows that it finished."""
        finished = self.begin().step(self._waiting)
        self._close(finished)
        return finished

    def begin(self) -> SlotBatch | LockstepBatch:
        """The batch under way; a new one where it has ended."""
        if self._batch is None or not (self._batch.busy or self._batch.takes(self._waiting)):
            self._batch = self._new_batch(self._waiting)
        return self._batch

    def _close(self, rows: Sequence[Row]) -> None:
        self._open.difference_update(rows)
        if not self._open:
            self._batch = None  # and its cache
