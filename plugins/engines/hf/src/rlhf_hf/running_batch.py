"""A generation that requests and new weights may join while it runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from rlhf_core.protocols import SamplingRequest
from rlhf_core.types import GenerationRequest, SamplingParams

from .lockstep import LockstepBatch
from .rows import DecodingRow, TokenSampler, make_rows
from .slots import SlotBatch


class RunningBatch:
    """All open rows of a generation: those in the current batch, and those that wait."""

    def __init__(
        self,
        sampler: Callable[[SamplingParams], TokenSampler],
        batch: Callable[[deque[DecodingRow]], SlotBatch | LockstepBatch],
        context_tokens: int | None,
    ) -> None:
        """`batch`: creates a batch from waiting rows. `context_tokens`: see `make_rows`."""
        self._new_sampler = sampler
        self._new_batch = batch
        self._context_tokens = context_tokens
        self._samplers: dict[SamplingParams, TokenSampler] = {}
        self._batch: SlotBatch | LockstepBatch | None = None
        self._open: set[DecodingRow] = set()
        self._waiting: deque[DecodingRow] = deque()
        """Rows that are not in a batch yet."""
        self._num_rows = 0
        self._version: int | None = None

    @property
    def is_busy(self) -> bool:
        return bool(self._open)

    def set_weights_version(self, version: int) -> None:
        """Set the version of the weights before a step."""
        if version == self._version:
            return
        self._version = version
        for row in self._open:
            row.version = version
        if self._batch is not None:
            self._batch.weights_changed()

    def add(self, requests: Sequence[SamplingRequest]) -> None:
        """Add rows for more requests. Raises `DataError` for a prompt that leaves no room for an answer."""
        assert self._version is not None
        groups: dict[SamplingParams, list[GenerationRequest]] = {}
        for request, sampling in requests:
            groups.setdefault(sampling, []).append(request)
        for sampling, group in groups.items():
            if sampling not in self._samplers:
                self._samplers[sampling] = self._new_sampler(sampling)
            sampler = self._samplers[sampling]
            rows = make_rows(
                group,
                sampling,
                self._context_tokens,
                first_key=self._num_rows,
                banned=sampler.banned,
                vocabulary=sampler.vocabulary,
            )
            self._num_rows += len(rows)
            for row in rows:
                row.sampler, row.version = sampler, self._version
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

    def step(self) -> list[DecodingRow]:
        """Run one pass and return the rows that it finished."""
        finished = self.begin().step(self._waiting)
        self._close(finished)
        return finished

    def begin(self) -> SlotBatch | LockstepBatch:
        """Return the current batch, or a new one if it has ended."""
        if self._batch is None or not (self._batch.is_busy or self._batch.can_admit(self._waiting)):
            self._batch = self._new_batch(self._waiting)
        return self._batch

    def _close(self, rows: Sequence[DecodingRow]) -> None:
        self._open.difference_update(rows)
        if not self._open:
            self._batch = None  # and its cache
