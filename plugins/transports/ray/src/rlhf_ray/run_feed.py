"""Feed of a maker of a `--transport ray` run: prompts come from the coordinator, samples go there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import ray

from rlhf_core.errors import SyncError
from rlhf_core.hookspecs import MakerHooks
from rlhf_core.types import GenerationRequest, PhaseTimes, Prompt, RolloutGroup, SamplingParams

from .actor_context import ActorContext, settle
from .calls import ANSWER_SECONDS, NamedActors, ask
from .maker_feed import MakerFeed
from .maker_parts import MakerParts, build_maker
from .messages import Canary, EvaluationWork, RolloutWork, RunOver, Work

_CANARY_ID = (1 << 62) + (1 << 61)
"""Sample ids of canary answers: greedy, so their noise does not matter, but no other sample has them."""
_LOOK_SECONDS = 1.0
"""Longest wait for more work while batches are being made, one of which may fail."""


class RunFeed(MakerFeed):
    """One maker's view of the coordinator."""

    def __init__(self, context: ActorContext, parts: MakerParts) -> None:
        self._coordinator = context.spec.coordinator
        takers = NamedActors(["coordinator"], timeout_seconds=0)
        takers.know({"coordinator": self._coordinator})
        config = self._config = context.config
        super().__init__(
            context.name,
            context.spec.index,
            parts.hooks,
            takers,
            timeout_seconds=ANSWER_SECONDS,
            heartbeat_seconds=config.heartbeat_seconds,
        )
        self._parts = parts
        self.in_flight = config.updates_in_flight()
        """Whether batches are made side by side."""
        self._keeps_samples = context.resolved.run.logging.samples != "none"
        self.worker = parts.worker
        self.canaries: dict[int, Canary] = {}
        """Policy version -> what came with it for comparison."""
        self._era: int | None = None

    @classmethod
    @contextmanager
    def opened(cls, context: ActorContext) -> Iterator[RunFeed]:
        """The feed, with everything loaded."""
        settle(None, num_threads=context.spec.num_threads)
        config = context.config
        parts = build_maker(
            context.resolved,
            context.hooks(MakerHooks),
            num_lanes=config.num_lanes(context.resolved.run.train.prompts_per_episode),
            sync_timeout_seconds=config.sync_timeout_seconds,
            cache_folder=context.cache_folder,
        )
        with ExitStack() as stack:
            stack.callback(context.sender.flush)
            stack.callback(parts.worker.close)
            if parts.evaluator is not None:
                stack.callback(parts.evaluator.close)
            yield cls(context, parts)

    @property
    def sends_texts(self) -> bool:
        return self._keeps_samples

    def join(self, update: Callable[..., None]) -> None:
        """Tell the coordinator that this maker is ready, with the newest weights taken by `update`."""
        context = ray.get_runtime_context()
        held_out = 0 if self._parts.evaluator is None else self._parts.evaluator.num_prompts
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
            self._compare()
            if isinstance(work, RolloutWork):
                self._begin_era(work.era)
                records = work.records or (None,) * len(work.positions)
                yield work.era, [self._parts.prompt(*each) for each in zip(work.positions, records, strict=True)]
            else:
                self._evaluate(work)

    def send(self, era: int, groups: Sequence[RolloutGroup], times: PhaseTimes) -> None:
        """Send the rewards' state, too, where they keep one."""
        if state := self.worker.scorer.state_dict():
            ask(self._coordinator, "keep_reward_state", self.number, state)
        super().send(era, groups, times)

    def _begin_era(self, era: int) -> None:
        """At the start, after a resume and a rollback: have the rewards go on from where they were."""
        if era == self._era:
            return
        self._era = era
        if state := ask(self._coordinator, "reward_state_of", self.number):
            self.worker.scorer.load_state_dict(state)

    def keep(self, group: RolloutGroup) -> bool:
        return super().keep(group) and self._parts.keep(group)

    def success(self, group: RolloutGroup) -> float | None:
        return self._parts.success(group)

    def _evaluate(self, work: EvaluationWork) -> None:
        assert self._parts.evaluator is not None
        with self.worker.computing():
            rows = self._parts.evaluator.rows(work.start, work.stop)
        ask(self._coordinator, "submit_evaluation", self.name, work, rows)

    def _compare(self) -> None:
        """Answer the canary prompts of a version that has just come in, and compare with what the trainer says."""
        worker = self.worker
        with worker.computing():
            version = worker.weights.newest
            canary = None if version is None else self._take_canary(version)
            if canary is None:
                return
            requests = [
                GenerationRequest(sample_id=_CANARY_ID + i, prompt_ids=p) for i, p in enumerate(canary.prompt_ids)
            ]
            answers = list(worker.engine.generate(requests, SamplingParams(max_new_tokens=1, greedy=True)))
        if any(each.policy_version != version for each in answers):
            return  # in flight, a newer one has come
        gap = 0.0
        for each in answers:
            expected = float(canary.log_probs[each.sample_id - _CANARY_ID, each.token_ids[0]])
            gap = max(gap, abs(expected - each.logprobs[0]))
        ask(self._coordinator, "canary_gap", self.name, version, gap)
        if not gap <= self._config.log_prob_gap_bound:
            raise SyncError(
                f"after the sync of version {version}, the log-probs of the maker's engine and of the trainer differ "
                f"by {gap:.3g} nats on the same prompts, more than transport.log_prob_gap_bound "
                f"({self._config.log_prob_gap_bound:g}): their weights or their arithmetic are not the same",
                where=self.name,
                hint="check that engine and strategy use one dtype; a coarser one on purpose needs a larger bound",
            )

    def _take_canary(self, version: int) -> Canary | None:
        """Take the canary of `version`, once. Older ones are forgotten."""
        for older in [known for known in self.canaries if known < version]:
            del self.canaries[older]
        return self.canaries.pop(version, None)
