"""A generation that requests and new weights may join on the way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from rlhf_core.protocols import Asked
from rlhf_core.types import GenerationRequest, SamplingParams

from .lockstep import LockstepBatch
from .rows import Row, Sampler, make_rows
from .slots import SlotBatch


class Flight:
    """The rows under way, in one batch as long as there are any."""

    def __init__(
        self,
        sampler: Callable[[SamplingParams], Sampler],
        batch: Callable[[list[Row]], SlotBatch | LockstepBatch],
        context_tokens: int | None,
    ) -> None:
        """batch: begins with these rows, and takes more. context_tokens: see `make_rows`."""
        self._new_sampler = sampler
        self._new_batch = batch
        self._context_tokens = context_tokens
        self._samplers: dict[SamplingParams, Sampler] = {}
        self._batch: SlotBatch | LockstepBatch | None = None
        self._open: set[Row] = set()
        self._waiting: deque[Row] = deque()
        """Rows that the batch has no room for, and those after them: they wait for its end."""
        self._canceled: set[Row] = set()
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

    def add(self, asked: Sequence[Asked]) -> None:
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
        """Drop an open row at the next step."""
        self._canceled.update(
            row for row in self._open if (row.request.sample_id, row.request.branch) == (sample_id, branch)
        )

    def step(self) -> list[Row]:
        """Run one pass; return the rows that it finished."""
        self._drop_canceled()
        if not self._open:
            return []
        batch = self.begin()
        if isinstance(batch, SlotBatch):
            joining = []
            while self._waiting and batch.has_room_for(self._waiting[0]):
                joining.append(self._waiting.popleft())
            batch.join(joining)
        finished = batch.step()
        self._open.difference_update(finished)
        if not batch.busy:
            self._batch = None
        return finished

    def begin(self) -> SlotBatch | LockstepBatch:
        """The batch under way; a new one of all rows that wait if there is none."""
        if self._batch is None:
            self._batch = self._new_batch([*self._waiting])
            self._waiting.clear()
        return self._batch

    def _drop_canceled(self) -> None:
        dropped, self._canceled = self._canceled, set()
        self._open -= dropped
        outside = dropped.intersection(self._waiting)
        self._waiting = deque(row for row in self._waiting if row not in outside)
        if self._batch is not None:
            for row in dropped - outside:
                self._batch.drop(row)
            if not self._batch.busy:
                self._batch = None
