"""Feed of a maker used directly: prompts from a data loader, samples to the trainers' buffers in turn."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any

from rlhf_core.errors import DataError
from rlhf_core.hooks import HookRelay
from rlhf_core.runfolder import PhaseTimer
from rlhf_core.seed import BatchReader
from rlhf_core.types import BufferItem, PhaseTimes, Prompt, RolloutGroup

from .calls import Call, NamedActors, collect

_MAKER_BITS, _STEP_BITS, _ROW_BITS = 22, 24, 16
"""Together 62 bits: sample ids are int64, and those from 1 << 62 are for evaluation."""


class LoaderFeed:
    """Numbers samples and distributes them. A full buffer blocks: a send waits until the previous one was taken."""

    def __init__(
        self, name: str, hooks: HookRelay, reader: BatchReader, trainers: NamedActors, *, timeout_seconds: float
    ) -> None:
        """`timeout_seconds`: longest wait for a trainer to take what it was sent."""
        self.hooks = hooks
        self.number = maker_number(name)
        self._name = name
        self._reader = reader
        self._trainers = trainers
        self._timeout_seconds = timeout_seconds
        self._num_steps = 0
        self._next = 0
        self._under_way: list[Call] = []
        self._timer = PhaseTimer()
        self._num_samples = 0
        self._started = 0.0

    def announce(self, temperature: float) -> None:
        """Find the trainers and announce that a loop starts."""
        self._timer, self._num_samples, self._started = PhaseTimer(), 0, time.perf_counter()
        self._trainers.look_up_again()
        calls = self._trainers.call("maker_started", self._name, temperature)
        collect(calls, timeout_seconds=self._timeout_seconds, doing="to hear that a maker starts")

    def batches(self, loaded: Iterable[Any]) -> Iterator[tuple[int, list[Prompt]]]:
        """The prompts of each batch of a loader; numbering continues from earlier loops."""
        for batch in loaded:
            step = self._num_steps
            prompts = self._reader.read(batch, sample_id(self.number, step, 0), f"data loader, batch {step}")
            sample_id(self.number, step, len(prompts) - 1)  # raises if the batch has too many rows to number
            self._num_steps += 1
            yield step, prompts

    def send(self, work: int, groups: Sequence[RolloutGroup]) -> None:
        """Send groups once the previous send has been taken; raises that send's errors."""
        self.flush()
        items = [item for group in groups for item in group.items]
        self._num_samples += len(items)
        dealt, self._next = deal(items, len(self._trainers.names), self._next)
        self._under_way = [
            (name, self._trainers.handle(name).buffer_extend.remote(part))
            for name, part in zip(self._trainers.names, dealt, strict=True)
            if part
        ]

    def flush(self) -> None:
        """Wait until everything sent has been taken."""
        calls, self._under_way = self._under_way, []
        with self._timer.phase("send"):
            collect(calls, timeout_seconds=self._timeout_seconds, doing="to take samples (is its buffer full?)")

    def performance(self, times: PhaseTimes) -> str:
        """One line on the loop: samples and tokens per second, and shares of time. `times`: the maker's phase times."""
        wall = max(time.perf_counter() - self._started, 1e-9)
        return (
            f"{self._name}: {self._num_samples} samples ({self._num_samples / wall:.1f}/s), "
            f"{times.response_tokens} tokens ({times.response_tokens / wall:.0f}/s) in {wall:.1f} s; "
            f"generating {times.rollout_s / wall:.0%}, waiting for trainers {self._timer.seconds('send') / wall:.0%}"
        )

    def say_done(self, error: str | None) -> None:
        """Tell all trainers that the loop is over."""
        calls = self._trainers.call("maker_done", self._name, error)
        collect(calls, timeout_seconds=self._timeout_seconds, doing="to hear that a maker is done")


def maker_number(name: str) -> int:
    """A number derived from a maker's name, the same in every run."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big") % (1 << _MAKER_BITS)


def sample_id(maker: int, step: int, row: int) -> int:
    """Unique number of a sample: row `row` of a maker's batch `step`, both from 0."""
    if row >= 1 << _ROW_BITS or step >= 1 << _STEP_BITS:
        raise DataError(f"row {row} of batch {step} cannot be numbered", where="data loader", hint="smaller batches")
    return (maker << _STEP_BITS | step) << _ROW_BITS | row


def deal(items: Sequence[BufferItem], num_targets: int, first: int) -> tuple[list[list[BufferItem]], int]:
    """Distribute items in turn, starting with target `first`; also returns the next target."""
    dealt: list[list[BufferItem]] = [[] for _ in range(num_targets)]
    for place, item in enumerate(items):
        dealt[(first + place) % num_targets].append(item)
    return dealt, (first + len(items)) % num_targets
