"""`MakerFeed`: provides a maker's prompts and sends its samples to the trainers.

A maker used directly takes its prompts from a data loader and sends to the trainers in turn (`LoaderFeed`). A maker of
a run takes them from the coordinator and sends there (`RunFeed`).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import ray

from rlhf_core.algorithm import RolloutAlgorithm
from rlhf_core.errors import DataError
from rlhf_core.hooks import HookRelay
from rlhf_core.types import PhaseTimes, Prompt, RolloutGroup
from rlhf_core.wiring import RunParts
from rlhf_seed import BatchReader

from .actor_context import HEARTBEAT_SECONDS, ActorContext, Heartbeat, set_up_process
from .calls import ANSWER_SECONDS, Call, NamedActors, ask, collect
from .maker_parts import MakerWorker, build_maker
from .messages import EvaluationWork, RolloutWork, RunOver, Work
from .sample_store import StoredGroup, store_groups

logger = logging.getLogger("rlhf.ray")

T = TypeVar("T")
_MAKER_BITS, _STEP_BITS, _ROW_BITS = 22, 24, 16
"""Together 62 bits: sample ids are int64, and ids from 1 << 62 are reserved for evaluation."""
_POLL_SECONDS = 1.0
"""Maximum wait for more work while batches are running, so that their failures are noticed."""


class MakerFeed(ABC):
    """Provides the prompts of batches, and sends groups to receivers in turn.

    Receivers are actors with a method `submit`: trainers, or a run's coordinator. A full receiver blocks the maker,
    since a send waits until the previous one has been taken. Only the maker's actor calls these methods.

    Example:
        with feed.heartbeat():
            for era, prompts in feed.batches():
                groups, times = worker.make(prompts)
                feed.send(era, groups, times)
            feed.flush()
    """

    def __init__(
        self,
        name: str,
        number: int,
        hooks: HookRelay,
        receivers: NamedActors,
        *,
        timeout_seconds: float,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
    ) -> None:
        """Create the feed.

        Args:
            name: Name of the maker.
            number: Number of the maker.
            hooks: Hooks of the maker.
            receivers: Actors that receive the groups.
            timeout_seconds: Maximum wait for a receiver to take samples.
            heartbeat_seconds: Silence after which a receiver presumes the maker dead.
        """
        self.name = name
        self.number = number
        self.hooks = hooks
        self.times = PhaseTimes()
        self.num_samples = 0
        """Number of samples sent, whose time is in `times`."""
        self._receivers = receivers
        self._timeout_seconds = timeout_seconds
        self._heartbeat_seconds = heartbeat_seconds
        self._next = 0
        self.sending = threading.RLock()
        """Held while groups are sent, since batches may be made concurrently."""
        self._pending: list[Call] = []
        self._num_pending = 0

    @abstractmethod
    def batches(self) -> Iterator[tuple[int, list[Prompt]]]:
        """Yield the prompts of each batch and the era in which they were assigned (see `RolloutWork`)."""

    def heartbeat(self) -> Heartbeat:
        """Context in which the receivers get heartbeats."""
        return Heartbeat(self._send_heartbeats, every_seconds=self._heartbeat_seconds / 4)

    def store(self, groups: Sequence[RolloutGroup]) -> list[StoredGroup]:
        """Put the groups into the object store, from which the receivers fetch them."""
        return store_groups(groups, self.name, texts=False)

    def send(self, era: int, groups: Sequence[RolloutGroup], times: PhaseTimes) -> None:
        """Send groups once the previous ones have been taken.

        Args:
            era: Era in which the prompts were assigned.
            groups: Finished groups.
            times: Time spent on these groups.

        Raises:
            RlhfError: Sending the previous groups failed.
        """
        self.flush()
        self.times.add(times)
        self.num_samples += sum(len(group.items) for group in groups)
        shares, self._next = distribute(self.store(groups), len(self._receivers.names), self._next)
        self._pending = [
            (receiver, self._receivers.handle(receiver).submit.remote(self.name, era, part, times))
            for receiver, part in zip(self._receivers.names, shares, strict=True)
            if part
        ]
        self._num_pending = len(groups)

    def flush(self) -> None:
        """Wait until all sent groups have been taken. Raises the error of a receiver."""
        with self.sending:
            calls, self._pending = self._pending, []
            taken = collect(calls, timeout_seconds=self._timeout_seconds, doing="to take samples (is it full?)")
        if calls and (late := self._num_pending - sum(taken)):
            reason = "groups came too late: another maker was first, or the run was rolled back"
            logger.info("%d of %d %s", late, self._num_pending, reason)

    def _send_heartbeats(self) -> None:
        for receiver in self._receivers.names:
            self._receivers.handle(receiver).maker_alive.remote(self.name)


def distribute(items: Sequence[T], num_targets: int, first: int) -> tuple[list[list[T]], int]:
    """Distribute items over the targets in turn.

    Args:
        items: Items to distribute.
        num_targets: Number of targets.
        first: Target of the first item, from 0.

    Returns:
        The items of each target, and the target of the next item.

    Example:
        >>> distribute(["a", "b", "c"], num_targets=2, first=1)
        ([['b'], ['a', 'c']], 0)
    """
    shares: list[list[T]] = [[] for _ in range(num_targets)]
    for offset, item in enumerate(items):
        shares[(first + offset) % num_targets].append(item)
    return shares, (first + len(items)) % num_targets


class LoaderFeed(MakerFeed):
    """Numbers the prompts of data loaders consecutively over all loops of a maker."""

    def __init__(
        self, name: str, hooks: HookRelay, reader: BatchReader, trainers: NamedActors, *, timeout_seconds: float
    ) -> None:
        super().__init__(name, maker_number(name), hooks, trainers, timeout_seconds=timeout_seconds)
        self.loaded: Iterable[Any] = ()
        """Batches of the current loop's data loader."""
        self._reader = reader
        self._num_steps = 0
        self._started = 0.0

    def announce(self) -> None:
        """Notify the trainers that a loop starts."""
        self.times, self.num_samples = PhaseTimes(), 0
        self._started = time.perf_counter()
        self._receivers.forget_handles()
        self._notify("maker_started")

    def batches(self) -> Iterator[tuple[int, list[Prompt]]]:
        for batch in self.loaded:
            step = self._num_steps
            prompts = self._reader.read(batch, sample_id(self.number, step, 0), f"data loader, batch {step}")
            sample_id(self.number, step, len(prompts) - 1)  # raises if the batch has too many rows to number
            self._num_steps += 1
            yield 0, prompts

    def performance(self) -> str:
        """One line about the loop: samples and tokens per second."""
        wall = max(time.perf_counter() - self._started, 1e-9)
        tokens = self.times.response_tokens
        samples = f"{self.num_samples} samples ({self.num_samples / wall:.1f}/s)"
        return f"{self.name}: {samples}, {tokens} tokens ({tokens / wall:.0f}/s) in {wall:.1f} s"

    def announce_end(self, error: str | None) -> None:
        """Notify all trainers that the loop is over. `error` is its failure, if any."""
        self._notify("maker_done", error)

    def _notify(self, method: str, *details: str | None) -> None:
        calls = self._receivers.call(method, self.name, *details)
        collect(calls, timeout_seconds=self._timeout_seconds, doing=f"to answer {method}")


def maker_number(name: str) -> int:
    """Number derived from a maker's name, the same in every run.

    Example:
        >>> maker_number("maker_0") == maker_number("maker_0")
        True
    """
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big") % (1 << _MAKER_BITS)


def sample_id(maker: int, step: int, row: int) -> int:
    """Unique number of a sample of a data loader.

    Args:
        maker: Number of the maker (see `maker_number`).
        step: Index of the batch, from 0.
        row: Index of the row in the batch, from 0.

    Returns:
        The number, below 1 << 62.

    Raises:
        DataError: The index of the batch or of the row is too large.

    Example:
        >>> sample_id(maker=0, step=1, row=2)
        65538
    """
    if row >= 1 << _ROW_BITS or step >= 1 << _STEP_BITS:
        raise DataError(f"cannot number row {row} of batch {step}", where="data loader", hint="use smaller batches")
    return (maker << _STEP_BITS | step) << _ROW_BITS | row


class RunFeed(MakerFeed):
    """Feed of a maker in a run: takes its prompts from the coordinator and sends its groups there."""

    def __init__(self, context: ActorContext, hooks: HookRelay, worker: MakerWorker, run: RunParts) -> None:
        self._coordinator = context.spec.coordinator
        receivers = NamedActors(["coordinator"], timeout_seconds=0)
        receivers.add_handles({"coordinator": self._coordinator})
        config = self._config = context.config
        super().__init__(
            context.name,
            context.spec.index,
            hooks,
            receivers,
            timeout_seconds=ANSWER_SECONDS,
            heartbeat_seconds=config.heartbeat_seconds,
        )
        self.worker = worker
        self._run = run
        self._sends_texts = run.resolved.run.logging.samples != "none"
        self._sampler = run.inputs.sampler() if run.resolved.rolls_out else None
        """Judges the groups. The coordinator has another sampler, which draws the records."""
        self._era: int | None = None

    @classmethod
    @contextmanager
    def load(cls, context: ActorContext) -> Iterator[RunFeed]:
        """Context with a feed whose models and plugins are loaded. They are closed on exit."""
        set_up_process(None, num_threads=context.spec.num_threads)
        config, hooks = context.config, context.hooks()
        worker, run = build_maker(
            context.resolved,
            hooks,
            max_batches=config.max_batches(context.resolved.run.train.prompts_per_episode),
            sync_timeout_seconds=config.sync_timeout_seconds,
            cache_folder=context.cache_folder,
            run_folder=Path(context.spec.folder),
        )
        with ExitStack() as stack:
            stack.callback(context.sender.flush)
            stack.callback(worker.close)
            if run.evaluator is not None:
                stack.callback(run.evaluator.close)
            yield cls(context, hooks, worker, run)

    def join(self, update: Callable[..., None]) -> None:
        """Register this maker with the coordinator, after `update` has taken the newest weights."""
        context = ray.get_runtime_context()
        held_out = 0 if self._run.evaluator is None else self._run.evaluator.num_prompts
        details = (self.name, os.getpid(), context.get_node_id(), held_out, context.current_actor)
        publication, wait = 0, self._config.sync_timeout_seconds
        while (newer := ask(self._coordinator, "register", *details, publication)) is not None:
            publication, calls = newer
            for call in calls:
                update(**{k: ray.get(v, timeout=wait) if isinstance(v, ray.ObjectRef) else v for k, v in call.items()})

    def batches(self, wait_for_room: Callable[[], int] = lambda: 0) -> Iterator[tuple[int, list[Prompt]]]:
        """Yield the prompts of leases until the run is over, each once its weights are live, and evaluate in between.

        Args:
            wait_for_room: Called before more work is requested. Returns the number of running batches.
        """
        while True:
            num_running = wait_for_room()
            poll = min(_POLL_SECONDS if num_running else 10.0, self._config.heartbeat_seconds / 4)
            work: Work | None = ask(self._coordinator, "next_work", self.name, poll, num_running, wait_seconds=poll)
            if isinstance(work, RunOver):
                return
            if work is None:
                self.flush()
                continue  # no deadline: the run ends if the coordinator, the driver or a trainer dies
            self.worker.weights.wait_live(work.version, timeout_seconds=self._config.sync_timeout_seconds)
            if isinstance(work, RolloutWork):
                self._begin_era(work.era)
                records = work.records or (None,) * len(work.positions)
                prompts = self._run.inputs.prompts
                yield work.era, [prompts.prompt(*each) for each in zip(work.positions, records, strict=True)]
            else:
                self._evaluate(work)

    def send(self, era: int, groups: Sequence[RolloutGroup], times: PhaseTimes) -> None:
        """Send groups, preceded by the state of rewards and players, if any."""
        if state := self.worker.state_dict():
            ask(self._coordinator, "keep_maker_state", self.number, state)
        super().send(era, groups, times)

    def _begin_era(self, era: int) -> None:
        """Restore the state of rewards and players if the era is new: at the start, after a resume or a rollback."""
        if era == self._era:
            return
        self._era = era
        if state := ask(self._coordinator, "maker_state_of", self.number):
            self.worker.load_state_dict(state)

    def store(self, groups: Sequence[RolloutGroup]) -> list[StoredGroup]:
        """Store the groups, with the judgments of the algorithm and the sampler."""
        algorithm, sampler = self._run.inputs.algorithm, self._sampler
        stored = store_groups(groups, self.name, texts=self._sends_texts)
        return [
            replace(
                each,
                keep=each.keep and (not isinstance(algorithm, RolloutAlgorithm) or algorithm.keep(group)),
                success=None if sampler is None else sampler.judge(group),
            )
            for each, group in zip(stored, groups, strict=True)
        ]

    def _evaluate(self, work: EvaluationWork) -> None:
        assert self._run.evaluator is not None
        with self.worker.computing():
            rows = self._run.evaluator.rows(work.start, work.stop)
        ask(self._coordinator, "submit_evaluation", self.name, work, rows)
