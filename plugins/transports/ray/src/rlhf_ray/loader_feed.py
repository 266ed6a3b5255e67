"""Feed of a maker used directly: prompts from a data loader, samples to the trainers in turn."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import Any

from rlhf_core.errors import DataError
from rlhf_core.hooks import HookRelay
from rlhf_core.runfolder import PhaseTimer
from rlhf_core.seed import BatchReader
from rlhf_core.types import PhaseTimes, Prompt

from .calls import NamedActors, collect
from .maker_feed import MakerFeed

_MAKER_BITS, _STEP_BITS, _ROW_BITS = 22, 24, 16
"""Together 62 bits: sample ids are int64, and those from 1 << 62 are for evaluation."""


class LoaderFeed(MakerFeed):
    """Numbers the prompts of data loaders, through all loops of a maker."""

    def __init__(
        self, name: str, hooks: HookRelay, reader: BatchReader, trainers: NamedActors, *, timeout_seconds: float
    ) -> None:
        super().__init__(name, maker_number(name), hooks, trainers, timeout_seconds=timeout_seconds)
        self.loaded: Iterable[Any] = ()
        """The batches of the loader of this loop."""
        self._reader = reader
        self._num_steps = 0
        self._started = 0.0

    @property
    def sends_texts(self) -> bool:
        """False: trainers do not ask for them, and metadata may be anything."""
        return False

    def announce(self, temperature: float) -> None:
        """Find the trainers and announce that a loop starts."""
        self.timer, self.times, self.num_samples = PhaseTimer(), PhaseTimes(), 0
        self._started = time.perf_counter()
        self._takers.look_up_again()
        self._tell("maker_started", temperature)

    def batches(self) -> Iterator[tuple[int, list[Prompt]]]:
        for batch in self.loaded:
            step = self._num_steps
            prompts = self._reader.read(batch, sample_id(self.number, step, 0), f"data loader, batch {step}")
            sample_id(self.number, step, len(prompts) - 1)  # raises if the batch has too many rows to number
            self._num_steps += 1
            yield 0, prompts

    def performance(self) -> str:
        """One line on the loop: samples and tokens per second, and shares of time."""
        wall = max(time.perf_counter() - self._started, 1e-9)
        tokens = self.times.response_tokens
        return (
            f"{self.name}: {self.num_samples} samples ({self.num_samples / wall:.1f}/s), "
            f"{tokens} tokens ({tokens / wall:.0f}/s) in {wall:.1f} s; "
            f"generating {self.times.rollout_s / wall:.0%}, "
            f"waiting for trainers {self.timer.seconds('send') / wall:.0%}"
        )

    def say_done(self, error: str | None) -> None:
        """Tell all trainers that the loop is over."""
        self._tell("maker_done", error)

    def _tell(self, method: str, about: float | str | None) -> None:
        calls = self._takers.call(method, self.name, about)
        collect(calls, timeout_seconds=self._timeout_seconds, doing=f"to answer {method}")


def maker_number(name: str) -> int:
    """A number derived from a maker's name, the same in every run."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big") % (1 << _MAKER_BITS)


def sample_id(maker: int, step: int, row: int) -> int:
    """Unique number of a sample: row `row` of a maker's batch `step`, both from 0."""
    if row >= 1 << _ROW_BITS or step >= 1 << _STEP_BITS:
        raise DataError(f"row {row} of batch {step} cannot be numbered", where="data loader", hint="smaller batches")
    return (maker << _STEP_BITS | step) << _ROW_BITS | row
