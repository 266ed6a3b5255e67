"""A maker's thread that fetches new weights while the maker generates."""

from __future__ import annotations

import logging
import threading
from typing import Any

import ray

from rlhf_core.errors import RlhfError, SyncError

from .calls import ask
from .holder_weights import StagedWeights
from .messages import Canary, WeightChunk, WeightEnd
from .wire import unpack

logger = logging.getLogger("rlhf.ray")


class WeightPuller:
    """Brings every version that the coordinator has to `weights`, which swaps it in between two batches.

    Asking for the next part is also the maker's sign of life. What goes wrong here is raised by `check`.
    """

    def __init__(
        self, maker: str, coordinator: Any, weights: StagedWeights, *, poll_seconds: float, timeout_seconds: float
    ) -> None:
        self._maker = maker
        self._coordinator = coordinator
        self._weights = weights
        self._poll_seconds = poll_seconds
        self._timeout_seconds = timeout_seconds
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._canaries: dict[int, Canary] = {}
        self._thread = threading.Thread(target=self._run, name="weight-puller", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def check(self) -> None:
        """Raise what ended the thread."""
        if self._error is not None:
            raise self._error

    def take_canary(self, version: int) -> Canary | None:
        """What came with `version` for comparison; once. Older ones are forgotten."""
        with self._lock:
            for older in [known for known in self._canaries if known < version]:
                del self._canaries[older]
            return self._canaries.pop(version, None)

    def wait_for(self, version: int) -> None:
        """Return when the next batch will be made with `version` or a newer one."""
        self.check()
        self._weights.wait_live(version, timeout_seconds=self._timeout_seconds)

    def _run(self) -> None:
        try:
            self._receive()
        except Exception as error:
            if not self._stop.is_set():
                self._error = error
                logger.exception("fetching weights failed")

    def _receive(self) -> None:
        serial, index = -1, 0
        while not self._stop.is_set():
            part = self._ask(serial, index)
            if part is None:
                continue
            if part.serial != serial:
                serial, index = part.serial, 0
                self._weights.begin(part.version, adapter_only=part.adapter_only)
            index += 1
            if isinstance(part, WeightChunk):
                chunk = unpack(ray.get(part.reference[0], timeout=self._timeout_seconds))
                self._weights.stage(part.version, part.role, chunk)
            else:
                self._finish(part)

    def _finish(self, end: WeightEnd) -> None:
        error: RlhfError | None = None
        if end.canary is not None:
            with self._lock:
                self._canaries[end.version] = end.canary
        try:
            self._weights.commit(end.version, end.checksums)
        except SyncError as refused:
            error = refused
        ask(self._coordinator, "have_weights", self._maker, end, error)

    def _ask(self, serial: int, index: int) -> WeightChunk | WeightEnd | None:
        poll = self._poll_seconds
        part: WeightChunk | WeightEnd | None = ask(
            self._coordinator, "next_weights", self._maker, serial, index, poll, wait_seconds=poll
        )
        return part
