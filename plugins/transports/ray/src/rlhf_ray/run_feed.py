"""A maker of a `--transport ray` run: prompts and weights come from the coordinator, samples go there."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import ray

from rlhf_core.errors import RlhfError, SyncError
from rlhf_core.hooks import HookRelay
from rlhf_core.hookspecs import MakerHooks
from rlhf_core.types import GenerationRequest, Prompt, RolloutGroup, SamplingParams

from .actor_context import ActorContext, ActorSpec
from .calls import answer, ask
from .holder_weights import StagedWeights
from .maker_parts import MakerParts, MakerWorker, build_maker
from .messages import Canary, EvaluationWork, Made, RolloutWork, RunOver, WeightChunk, WeightEnd, Work
from .wire import pack_group, unpack

logger = logging.getLogger("rlhf.ray")

_CANARY_ID = (1 << 62) + (1 << 61)
"""Sample ids of canary answers: greedy, so their noise does not matter, but no other sample has them."""


class RunFeed:
    """What the coordinator has for one maker. Settles into the process when made, loads nothing before `opened`."""

    hooks: HookRelay
    _parts: MakerParts
    _puller: WeightPuller

    def __init__(self, name: str, spec: ActorSpec) -> None:
        self._name = name
        self.number = spec.index
        self._context = ActorContext(name, spec)
        self._coordinator = spec.coordinator
        self._config = self._context.config
        self._poll_seconds = min(10.0, self._config.heartbeat_seconds / 4)
        self._under_way: tuple[Any, int] | None = None
        """The answer to come to the groups that were sent last, and how many they are."""

    @contextmanager
    def opened(self) -> Iterator[MakerWorker]:
        """Everything is loaded and the coordinator knows it; weights come in from now on."""
        self._context.settle()
        self.hooks = self._context.hooks(MakerHooks)
        timeout = self._config.sync_timeout_seconds
        self._parts = build_maker(
            self._context.resolved, self.hooks, sync_timeout_seconds=timeout, cache_folder=self._context.cache_folder
        )
        worker = self._parts.worker
        self._puller = WeightPuller(
            self._name, self._coordinator, worker.weights, poll_seconds=self._poll_seconds, timeout_seconds=timeout
        )
        with ExitStack() as stack:
            stack.callback(self._context.sender.flush)
            stack.callback(worker.close)
            stack.callback(self._puller.stop)
            node = ray.get_runtime_context().get_node_id()
            held_out = 0 if self._parts.evaluator is None else self._parts.evaluator.num_prompts
            ask(self._coordinator, "register", self._name, os.getpid(), node, held_out)
            self._puller.start()
            yield worker

    def batches(self) -> Iterator[tuple[RolloutWork, list[Prompt]]]:
        """Leases, each once the weights it asks for are live, until the run is over; evaluations on the way."""
        poll = self._poll_seconds
        while True:
            self._puller.check()
            work: Work | None = ask(self._coordinator, "next_work", self._name, poll, wait_seconds=poll)
            if isinstance(work, RunOver):
                return
            if work is None:
                self.flush()
                continue  # the run goes on for as long as coordinator, driver and trainers live: they are watched
            self._puller.wait_for(work.version)
            self._compare()
            if isinstance(work, RolloutWork):
                yield work, [self._parts.prompt(position) for position in work.positions]
            else:
                self._evaluate(work)

    def send(self, work: RolloutWork, groups: Sequence[RolloutGroup]) -> None:
        """Send a lease's groups, once those before were taken; errors of that are raised here."""
        self.flush()
        keep = [not group.is_empty and self._parts.keep(group) for group in groups]
        made = [Made(pack_group(group), kept) for group, kept in zip(groups, keep, strict=True)]
        times = self._parts.worker.take_times()
        self._under_way = self._coordinator.submit.remote(self._name, work.era, made, times), len(made)

    def flush(self) -> None:
        """Return when everything that was sent has been taken."""
        if self._under_way is None:
            return
        (reference, num_groups), self._under_way = self._under_way, None
        wanted = answer(reference, "submit")
        if wanted < num_groups:
            logger.info(
                "%d of %d groups came too late: another maker was first, or the run went back to a checkpoint",
                num_groups - wanted,
                num_groups,
            )

    def _evaluate(self, work: EvaluationWork) -> None:
        assert self._parts.evaluator is not None
        with self._parts.worker.weights.making():
            rows = self._parts.evaluator.rows(work.start, work.stop)
        ask(self._coordinator, "submit_evaluation", self._name, work, rows)

    def _compare(self) -> None:
        """Answer the canary prompts of a version that has just come in, and compare with what the trainer says."""
        worker = self._parts.worker
        with worker.weights.making():
            version = worker.weights.newest
            canary = None if version is None else self._puller.take_canary(version)
            if canary is None:
                return
            requests = [
                GenerationRequest(sample_id=_CANARY_ID + i, prompt_ids=p) for i, p in enumerate(canary.prompt_ids)
            ]
            answers = list(worker.engine.generate(requests, SamplingParams(max_new_tokens=1, greedy=True)))
        gap = 0.0
        for each in answers:
            expected = float(canary.log_probs[each.sample_id - _CANARY_ID, each.token_ids[0]])
            gap = max(gap, abs(expected - each.logprobs[0]))
        ask(self._coordinator, "canary_gap", self._name, version, gap)
        if not gap <= self._config.log_prob_gap_bound:
            raise SyncError(
                f"after the sync of version {version}, the log-probs of the maker's engine and of the trainer differ "
                f"by {gap:.3g} nats on the same prompts, more than transport.log_prob_gap_bound "
                f"({self._config.log_prob_gap_bound:g}): their weights or their arithmetic are not the same",
                where=self._name,
                hint="check that engine and strategy use one dtype; a coarser one on purpose needs a larger bound",
            )


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
