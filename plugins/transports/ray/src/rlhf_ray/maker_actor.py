"""The maker of a run: asks for work, makes it, and sends it on while it makes the next."""

from __future__ import annotations

import logging
import os
import queue
import threading
from contextlib import ExitStack
from typing import Any

import ray

from rlhf_core.errors import DeadlineError, SyncError
from rlhf_core.hooks import HookRelay
from rlhf_core.hookspecs import MakerHooks
from rlhf_core.types import GenerationRequest, PhaseTimes, RolloutGroup, SamplingParams

from .actor_context import ActorContext, ActorSpec
from .calls import ask
from .maker_parts import MakerParts, build_maker
from .messages import EvaluationWork, Made, RolloutWork, RunOver, Work
from .weight_puller import WeightPuller
from .wire import pack_group

logger = logging.getLogger("rlhf.ray")

_CANARY_ID = (1 << 62) + (1 << 61)
"""Sample ids of canary answers: greedy, so their noise does not matter, but no other sample has them."""
_SEND_SECONDS = 120.0
"""Longest wait for a batch to be sent."""
_SENDS_UNDER_WAY = 2


class MakerActor:
    """One maker. Its class is called `ExperienceMakerHolder` in Ray, as the seed's is (see `maker_class`)."""

    def __init__(self, name: str, index: int, spec: ActorSpec) -> None:
        self._context = ActorContext(name, spec)
        self._name = name
        self._index = index
        self._coordinator = spec.coordinator
        self._config = self._context.config

    def work(self) -> None:
        """Load everything, then make what there is to make until the run is over."""
        self._context.settle()
        hooks = self._context.hooks(MakerHooks)
        parts = build_maker(
            self._context.resolved,
            hooks,
            sync_timeout_seconds=self._config.sync_timeout_seconds,
            cache_folder=self._context.cache_folder,
        )
        puller = WeightPuller(
            self._name,
            self._coordinator,
            parts.worker.weights,
            poll_seconds=min(10.0, self._config.heartbeat_seconds / 4),
            timeout_seconds=self._config.sync_timeout_seconds,
        )
        with ExitStack() as stack:
            stack.callback(self._context.sender.flush)
            stack.callback(parts.worker.close)
            stack.callback(puller.stop)
            node = ray.get_runtime_context().get_node_id()
            held_out = 0 if parts.evaluator is None else parts.evaluator.num_prompts
            ask(self._coordinator, "register", self._name, os.getpid(), node, held_out)
            puller.start()
            sender = stack.enter_context(GroupSender(self._name, self._coordinator, hooks))
            with hooks.span("maker_loop", maker=self._index):
                self._loop(parts, puller, sender)

    def _loop(self, parts: MakerParts, puller: WeightPuller, sender: GroupSender) -> None:
        poll = min(10.0, self._config.heartbeat_seconds / 4)
        while True:
            puller.check()
            sender.check()
            work: Work | None = ask(self._coordinator, "next_work", self._name, poll, wait_seconds=poll)
            if isinstance(work, RunOver):
                return
            if work is None:
                continue  # the run goes on for as long as coordinator, driver and trainers live: they are watched
            puller.wait_for(work.version)
            self._compare(parts, puller)
            if isinstance(work, RolloutWork):
                groups = parts.worker.make([parts.prompt(position) for position in work.positions])
                keep = [not group.is_empty and parts.keep(group) for group in groups]
                sender.send(work.era, groups, keep, parts.worker.take_times())
            else:
                self._evaluate(parts, work)

    def _evaluate(self, parts: MakerParts, work: EvaluationWork) -> None:
        assert parts.evaluator is not None
        with parts.worker.weights.making():
            rows = parts.evaluator.rows(work.start, work.stop)
        ask(self._coordinator, "submit_evaluation", self._name, work, rows)

    def _compare(self, parts: MakerParts, puller: WeightPuller) -> None:
        """Answer the canary prompts of a version that has just come in, and compare with what the trainer says."""
        worker = parts.worker
        with worker.weights.making():
            version = worker.weights.newest
            canary = None if version is None else puller.take_canary(version)
            if canary is None:
                return
            requests = [
                GenerationRequest(sample_id=_CANARY_ID + i, prompt_ids=p) for i, p in enumerate(canary.prompt_ids)
            ]
            answers = list(worker.engine.generate(requests, SamplingParams(max_new_tokens=1, greedy=True)))
        gap = 0.0
        for answer in answers:
            expected = float(canary.log_probs[answer.sample_id - _CANARY_ID, answer.token_ids[0]])
            gap = max(gap, abs(expected - answer.logprobs[0]))
        ask(self._coordinator, "canary_gap", self._name, version, gap)
        if not gap <= self._config.log_prob_gap_bound:
            raise SyncError(
                f"after the sync of version {version}, the log-probs of the maker's engine and of the trainer differ "
                f"by {gap:.3g} nats on the same prompts, more than transport.log_prob_gap_bound "
                f"({self._config.log_prob_gap_bound:g}): their weights or their arithmetic are not the same",
                where=self._name,
                hint="check that engine and strategy use one dtype; a coarser one on purpose needs a larger bound",
            )


class GroupSender:
    """Packs and sends finished groups from a thread of its own; at most a few batches wait to be sent."""

    def __init__(self, maker: str, coordinator: Any, hooks: HookRelay) -> None:
        self._maker = maker
        self._coordinator = coordinator
        self._hooks = hooks
        self._queue: queue.Queue[tuple[int, list[RolloutGroup], list[bool], PhaseTimes] | None] = queue.Queue(
            _SENDS_UNDER_WAY
        )
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="group-sender", daemon=True)

    def __enter__(self) -> GroupSender:
        self._thread.start()
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if error is None:
            self._put(None)
            self._thread.join(_SEND_SECONDS)
            self.check()
            if self._thread.is_alive():
                raise self._late()

    def send(self, era: int, groups: list[RolloutGroup], keep: list[bool], times: PhaseTimes) -> None:
        """Hand over a batch of the work of `era`; waits while earlier ones are still on their way."""
        self._put((era, groups, keep, times))

    def check(self) -> None:
        """Raise what went wrong in the thread."""
        if self._error is not None:
            raise self._error

    def _put(self, job: tuple[int, list[RolloutGroup], list[bool], PhaseTimes] | None) -> None:
        try:
            self._queue.put(job, timeout=_SEND_SECONDS)
        except queue.Full:
            self.check()
            raise self._late() from None

    def _late(self) -> DeadlineError:
        return DeadlineError(f"waited {_SEND_SECONDS:g} s to send samples to the coordinator", where=self._maker)

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            if self._error is not None:
                continue
            era, groups, keep, times = job
            try:
                with self._hooks.span("send", num_groups=len(groups)):
                    made = [Made(pack_group(group), kept) for group, kept in zip(groups, keep, strict=True)]
                    wanted = ask(self._coordinator, "submit", self._maker, era, made, times)
                if wanted < len(made):
                    logger.info(
                        "%d of %d groups came too late: another maker was first, or the run went back to a checkpoint",
                        len(made) - wanted,
                        len(made),
                    )
            except Exception as error:
                self._error = error


def maker_class() -> type:
    """`MakerActor` under the seed's name, which is what Ray shows in the process table."""
    return type("ExperienceMakerHolder", (MakerActor,), {"__module__": __name__, "__doc__": MakerActor.__doc__})
