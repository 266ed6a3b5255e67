"""Batches that are made side by side, so that the engine has work while the last answers of one of them end."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from rlhf_core.types import Prompt

from .maker_parts import MakerWorker
from .run_feed import RunFeed

_LOOK_SECONDS = 0.5
"""How often it is looked whether one has failed. The deadline of a batch is that of its lease."""


class Lanes:
    """Makes what a feed gives, in as many batches at a time as the worker has makers."""

    def __init__(self, worker: MakerWorker, feed: RunFeed) -> None:
        self._worker = worker
        self._feed = feed
        self._open: set[Future[None]] = set()

    def make_all(self) -> None:
        """Until the feed has no more. Raises the first error of a batch."""
        with ThreadPoolExecutor(self._worker.num_lanes, thread_name_prefix="lane") as pool:
            for era, prompts in self._feed.batches(self._wait_for_room):
                self._open.add(pool.submit(self._make, era, prompts))
            while self._open:
                self._collect()
        self._feed.flush()

    def _make(self, era: int, prompts: Sequence[Prompt]) -> None:
        groups, times = self._worker.make(prompts)
        with self._feed.sending, self._feed.hooks.span("send", num_groups=len(groups)):
            self._feed.send(era, groups, times)

    def _wait_for_room(self) -> int:
        """Wait until another batch may begin; returns how many are open."""
        self._collect(0.0)
        while len(self._open) >= self._worker.num_lanes:
            self._collect()
        return len(self._open)

    def _collect(self, seconds: float = _LOOK_SECONDS) -> None:
        done, self._open = wait(self._open, seconds, FIRST_COMPLETED)
        for each in done:
            each.result()
