"""What feeds a maker of a `--transport ray` run: prompts come from the coordinator, samples go there."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import ray

from rlhf_core.errors import SyncError
from rlhf_core.hooks import HookRelay
from rlhf_core.hookspecs import MakerHooks
from rlhf_core.types import GenerationRequest, Prompt, RolloutGroup, SamplingParams

from .actor_context import ActorContext, ActorSpec, Heartbeat, settle
from .calls import answer, ask
from .maker_parts import MakerParts, MakerWorker, build_maker
from .messages import Canary, EvaluationWork, Made, RolloutWork, RunOver, Work
from .wire import pack_group

logger = logging.getLogger("rlhf.ray")

_CANARY_ID = (1 << 62) + (1 << 61)
"""Sample ids of canary answers: greedy, so their noise does not matter, but no other sample has them."""


class RunFeed:
    """What the coordinator has for one maker. Settles into the process when made, loads nothing before `opened`."""

    hooks: HookRelay
    _parts: MakerParts

    def __init__(self, name: str, spec: ActorSpec) -> None:
        self._name = name
        self.number = spec.index
        self._context = ActorContext(name, spec)
        self._coordinator = spec.coordinator
        self._config = self._context.config
        self._poll_seconds = min(10.0, self._config.heartbeat_seconds / 4)
        self._under_way: tuple[Any, int] | None = None
        """The answer to come to the groups that were sent last, and how many they are."""
        self.canaries: dict[int, Canary] = {}
        """Policy version -> what came with it for comparison."""

    @contextmanager
    def opened(self) -> Iterator[MakerWorker]:
        """Everything is loaded; the coordinator has signs of life."""
        settle(None, num_threads=self._context.spec.num_threads)
        self.hooks = self._context.hooks(MakerHooks)
        timeout = self._config.sync_timeout_seconds
        self._parts = build_maker(
            self._context.resolved, self.hooks, sync_timeout_seconds=timeout, cache_folder=self._context.cache_folder
        )
        worker = self._parts.worker
        with ExitStack() as stack:
            stack.callback(self._context.sender.flush)
            stack.callback(worker.close)
            if self._parts.evaluator is not None:
                stack.callback(self._parts.evaluator.close)
            alive = partial(self._coordinator.maker_alive.remote, self._name)
            stack.enter_context(Heartbeat(alive, every_seconds=self._poll_seconds))
            yield worker

    def join(self, update: Callable[..., None]) -> None:
        """Tell the coordinator that this maker is ready, with the newest weights taken by `update`."""
        context = ray.get_runtime_context()
        held_out = 0 if self._parts.evaluator is None else self._parts.evaluator.num_prompts
        about = (self._name, os.getpid(), context.get_node_id(), held_out, context.current_actor)
        has, wait = 0, self._config.sync_timeout_seconds
        while (newer := ask(self._coordinator, "register", *about, has)) is not None:
            has, calls = newer
            for call in calls:
                update(**{k: ray.get(v, timeout=wait) if isinstance(v, ray.ObjectRef) else v for k, v in call.items()})

    def batches(self) -> Iterator[tuple[RolloutWork, list[Prompt]]]:
        """Leases, each once the weights it asks for are live, until the run is over; evaluations on the way."""
        poll = self._poll_seconds
        while True:
            work: Work | None = ask(self._coordinator, "next_work", self._name, poll, wait_seconds=poll)
            if isinstance(work, RunOver):
                return
            if work is None:
                self.flush()
                continue  # the run goes on for as long as coordinator, driver and trainers live: they are watched
            timeout = self._config.sync_timeout_seconds
            self._parts.worker.weights.wait_live(work.version, timeout_seconds=timeout)
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
            canary = None if version is None else self._take_canary(version)
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

    def _take_canary(self, version: int) -> Canary | None:
        """What came with `version`; once. Older ones are forgotten."""
        for older in [known for known in self.canaries if known < version]:
            del self.canaries[older]
        return self.canaries.pop(version, None)
