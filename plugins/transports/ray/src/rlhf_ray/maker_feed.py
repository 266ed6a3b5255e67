"""`MakerFeed`: gives a maker its prompts, and sends its samples to those who train on them.

A maker used by hand takes its prompts from a data loader, and sends to the trainers in turn (`LoaderFeed`); one of a
run takes them from the coordinator, and sends there (`RunFeed`).
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

from .actor_context import HEARTBEAT_SECONDS, ActorContext, Heartbeat, settle
from .calls import ANSWER_SECONDS, Call, NamedActors, ask, collect
from .maker_parts import MakerWorker, build_maker
from .messages import EvaluationWork, RolloutWork, RunOver, Work
from .sample_store import StoredGroup, store_groups

logger = logging.getLogger("rlhf.ray")

T = TypeVar("T")
_MAKER_BITS, _STEP_BITS, _ROW_BITS = 22, 24, 16
"""Together 62 bits: sample ids are int64, and those from 1 << 62 are for evaluation."""
_LOOK_SECONDS = 1.0
"""Longest wait for more work while batches are being made, one of which may fail."""


class MakerFeed(ABC):
    """Sends groups to the takers in turn: actors with a method `submit`, such as trainers, or a run's coordinator.

    A taker that is full holds the maker up: a send waits until the previous one has been taken.
    """

    def __init__(
        self,
        name: str,
        number: int,
        hooks: HookRelay,
        takers: NamedActors,
        *,
        timeout_seconds: float,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
    ) -> None:
        """name, number: the maker's. timeout_seconds: longest wait for a taker to take what it was sent.
        heartbeat_seconds: the silence after which a taker holds the maker for dead.
        """
        self.name = name
        self.number = number
        self.hooks = hooks
        self.times = PhaseTimes()
        self.num_samples = 0
        """Samples in all that was sent; `times` covers the same."""
        self._takers = takers
        self._timeout_seconds = timeout_seconds
        self._heartbeat_seconds = heartbeat_seconds
        self._next = 0
        self.sending = threading.RLock()
        """Held while something is sent: batches may be made side by side."""
        self._under_way: list[Call] = []
        self._num_under_way = 0

    @abstractmethod
    def batches(self) -> Iterator[tuple[int, list[Prompt]]]:
        """The prompts of each batch, and the era in which they were given out (see `RolloutWork`)."""

    def alive(self) -> Heartbeat:
        """Context in which the takers get signs of life."""
        return Heartbeat(self._beat, every_seconds=self._heartbeat_seconds / 4)

    def store(self, groups: Sequence[RolloutGroup]) -> list[StoredGroup]:
        """Put the groups where the takers fetch them."""
        return store_groups(groups, self.name, texts=False)

    def send(self, era: int, groups: Sequence[RolloutGroup], times: PhaseTimes) -> None:
        """Send groups once the previous ones have been taken, and raise their errors. `times`: spent on these."""
        self.flush()
        self.times.add(times)
        self.num_samples += sum(len(group.items) for group in groups)
        dealt, self._next = deal(self.store(groups), len(self._takers.names), self._next)
        self._under_way = [
            (taker, self._takers.handle(taker).submit.remote(self.name, era, part, times))
            for taker, part in zip(self._takers.names, dealt, strict=True)
            if part
        ]
        self._num_under_way = len(groups)

    def flush(self) -> None:
        """Wait until everything sent has been taken."""
        with self.sending:
            calls, self._under_way = self._under_way, []
            taken = collect(calls, timeout_seconds=self._timeout_seconds, doing="to take samples (is it full?)")
        if calls and (late := self._num_under_way - sum(taken)):
            told = "groups came too late: another maker was first, or the run went back to a checkpoint"
            logger.info("%d of %d %s", late, self._num_under_way, told)

    def _beat(self) -> None:
        for taker in self._takers.names:
            self._takers.handle(taker).maker_alive.remote(self.name)


def deal(items: Sequence[T], num_targets: int, first: int) -> tuple[list[list[T]], int]:
    """Distribute items in turn, starting with target `first`; also returns the next target."""
    dealt: list[list[T]] = [[] for _ in range(num_targets)]
    for place, item in enumerate(items):
        dealt[(first + place) % num_targets].append(item)
    return dealt, (first + len(items)) % num_targets


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

    def announce(self) -> None:
        """Find the trainers and announce that a loop starts."""
        self.times, self.num_samples = PhaseTimes(), 0
        self._started = time.perf_counter()
        self._takers.look_up_again()
        self._tell("maker_started")

    def batches(self) -> Iterator[tuple[int, list[Prompt]]]:
        for batch in self.loaded:
            step = self._num_steps
            prompts = self._reader.read(batch, sample_id(self.number, step, 0), f"data loader, batch {step}")
            sample_id(self.number, step, len(prompts) - 1)  # raises if the batch has too many rows to number
            self._num_steps += 1
            yield 0, prompts

    def performance(self) -> str:
        """One line on the loop: samples and tokens per second."""
        wall = max(time.perf_counter() - self._started, 1e-9)
        tokens = self.times.response_tokens
        samples = f"{self.num_samples} samples ({self.num_samples / wall:.1f}/s)"
        return f"{self.name}: {samples}, {tokens} tokens ({tokens / wall:.0f}/s) in {wall:.1f} s"

    def say_done(self, error: str | None) -> None:
        """Tell all trainers that the loop is over."""
        self._tell("maker_done", error)

    def _tell(self, method: str, *about: str | None) -> None:
        calls = self._takers.call(method, self.name, *about)
        collect(calls, timeout_seconds=self._timeout_seconds, doing=f"to answer {method}")


def maker_number(name: str) -> int:
    """A number derived from a maker's name, the same in every run."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big") % (1 << _MAKER_BITS)


def sample_id(maker: int, step: int, row: int) -> int:
    """Unique number of a sample: row `row` of a maker's batch `step`, both from 0."""
    if row >= 1 << _ROW_BITS or step >= 1 << _STEP_BITS:
        raise DataError(f"row {row} of batch {step} cannot be numbered", where="data loader", hint="smaller batches")
    return (maker << _STEP_BITS | step) << _ROW_BITS | row


class RunFeed(MakerFeed):
    """One maker's view of the coordinator."""

    def __init__(self, context: ActorContext, hooks: HookRelay, worker: MakerWorker, run: RunParts) -> None:
        self._coordinator = context.spec.coordinator
        takers = NamedActors(["coordinator"], timeout_seconds=0)
        takers.know({"coordinator": self._coordinator})
        config = self._config = context.config
        super().__init__(
            context.name,
            context.spec.index,
            hooks,
            takers,
            timeout_seconds=ANSWER_SECONDS,
            heartbeat_seconds=config.heartbeat_seconds,
        )
        self.worker = worker
        self._run = run
        self._sends_texts = run.resolved.run.logging.samples != "none"
        self._sampler = run.inputs.sampler() if run.resolved.rolls_out else None
        """Judges the groups; the coordinator has another one, which draws."""
        self._era: int | None = None

    @classmethod
    @contextmanager
    def opened(cls, context: ActorContext) -> Iterator[RunFeed]:
        """The feed, with everything loaded."""
        settle(None, num_threads=context.spec.num_threads)
        config, hooks = context.config, context.hooks()
        worker, run = build_maker(
            context.resolved,
            hooks,
            num_lanes=config.num_lanes(context.resolved.run.train.prompts_per_episode),
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
        """Tell the coordinator that this maker is ready, with the newest weights taken by `update`."""
        context = ray.get_runtime_context()
        held_out = 0 if self._run.evaluator is None else self._run.evaluator.num_prompts
        about = (self.name, os.getpid(), context.get_node_id(), held_out, context.current_actor)
        has, wait = 0, self._config.sync_timeout_seconds
        while (newer := ask(self._coordinator, "register", *about, has)) is not None:
            has, calls = newer
            for call in calls:
                update(**{k: ray.get(v, timeout=wait) if isinstance(v, ray.ObjectRef) else v for k, v in call.items()})

    def batches(self, wait_for_room: Callable[[], int] = lambda: 0) -> Iterator[tuple[int, list[Prompt]]]:
        """Leases, each once the weights it asks for are live, until the run is over; evaluations on the way.

        wait_for_room: called before more work is asked for; returns the number of batches that are being made.
        """
        while True:
            under_way = wait_for_room()
            poll = min(_LOOK_SECONDS if under_way else 10.0, self._config.heartbeat_seconds / 4)
            work: Work | None = ask(self._coordinator, "next_work", self.name, poll, under_way, wait_seconds=poll)
            if isinstance(work, RunOver):
                return
            if work is None:
                self.flush()
                continue  # the run goes on for as long as coordinator, driver and trainers live: they are watched
            self.worker.weights.wait_live(work.version, timeout_seconds=self._config.sync_timeout_seconds)
            if isinstance(work, RolloutWork):
                self._begin_era(work.era)
                records = work.records or (None,) * len(work.positions)
                prompts = self._run.inputs.prompts
                yield work.era, [prompts.prompt(*each) for each in zip(work.positions, records, strict=True)]
            else:
                self._evaluate(work)

    def send(self, era: int, groups: Sequence[RolloutGroup], times: PhaseTimes) -> None:
        """Send the state of rewards and players, too, if they keep any."""
        if state := self.worker.state_dict():
            ask(self._coordinator, "keep_maker_state", self.number, state)
        super().send(era, groups, times)

    def _begin_era(self, era: int) -> None:
        """At the start, after a resume and a rollback: have rewards and players continue from their state then."""
        if era == self._era:
            return
        self._era = era
        if state := ask(self._coordinator, "maker_state_of", self.number):
            self.worker.load_state_dict(state)

    def store(self, groups: Sequence[RolloutGroup]) -> list[StoredGroup]:
        """With what algorithm and sampler make of them."""
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
