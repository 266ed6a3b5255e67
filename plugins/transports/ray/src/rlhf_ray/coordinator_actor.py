"""`Coordinator`: the central actor of a run, which all other actors call.

It owns the prompts (core's `RolloutCoordinator`), the parts of an evaluation and the events for the driver. It keeps
the calls that deliver the newest weights, for makers that start later. It never computes and never waits for another
actor, so it always answers. A caller whose request cannot be met yet waits here, with a deadline. It imports neither
torch nor a plugin.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlhf_core.errors import DeadlineError
from rlhf_core.protocols import Sampler
from rlhf_core.rollout import EvaluationRow
from rlhf_core.types import PhaseTimes

from .config import RayConfig
from .coordinator_parts import ActorRegistry, EvaluationJobs, MakerStates, Waiters
from .leases import LeasedCoordinator
from .messages import (
    EvaluationWork,
    Event,
    LogLine,
    Overview,
    RolloutWork,
    RunOver,
    TakenEpisode,
    Work,
)
from .sample_store import StoredGroup


class Coordinator:
    """Asyncio actor whose methods either return quickly or await a change of state."""

    def __init__(
        self,
        config: RayConfig,
        *,
        num_makers: int,
        num_episodes: int,
        prompts_per_episode: int,
        sampler: Sampler | None = None,
    ) -> None:
        """Set up the ledger of prompts.

        Args:
            config: Options of the transport.
            num_makers: Number of makers at the start (see `scale`).
            num_episodes: Episodes of the run. 0 if it generates no rollouts.
            prompts_per_episode: Prompts of each episode.
            sampler: Draws the records of the prompts. None without a sampler.
        """
        self._prompts_per_lease = config.prompts_per_lease
        self._num_episodes = num_episodes
        self._prompts_per_episode = prompts_per_episode
        self._prompts = LeasedCoordinator(
            num_episodes=num_episodes,
            prompts_per_episode=prompts_per_episode,
            max_staleness=config.max_staleness,
            sampler=sampler,
        )
        self._waiters = Waiters()
        self._makers = ActorRegistry(config.heartbeat_seconds, config.lease_seconds)
        self._num_makers = num_makers
        self._trainers = ActorRegistry(config.heartbeat_seconds)
        self._newest: Sequence[Mapping[str, Any]] = ()
        """Calls of `update_experience_maker` that deliver the newest version."""
        self._num_publications = 0
        self._evaluation = EvaluationJobs()
        self._num_evaluation_prompts = 0
        self._is_published = False
        self._era = 0
        self._is_over = False
        self._is_interrupted = False
        self._taken: tuple[int, TakenEpisode] | None = None
        self._arrivals: dict[int, float] = {}
        self._times = PhaseTimes()
        self._taken_times = PhaseTimes()
        """Times of the episode that was taken last."""
        self._events: list[Event | LogLine] = []
        self._maker_states = MakerStates()

    # Called by makers.

    async def register(
        self, maker: str, pid: int, node: str, num_evaluation_prompts: int, actor: Any = None, publication: int = 0
    ) -> tuple[int, Sequence[Mapping[str, Any]]] | None:
        """Register a maker whose models are loaded: it may request work, and trainers send it new weights.

        Args:
            maker: Name of the maker.
            pid: Process id of the maker.
            node: Ray's id of its node.
            num_evaluation_prompts: Number of held-out prompts, 0 without an evaluation.
            actor: Handle of the maker, with which trainers call it.
            publication: Number of the publication whose weights it has.

        Returns:
            None if it was registered. If it lacks the newest weights: the number of the newest publication, and the
            calls of `update_experience_maker` that deliver it.
        """
        if publication != self._num_publications:
            return self._num_publications, self._newest
        self._num_evaluation_prompts = num_evaluation_prompts
        self._makers.register(maker, pid, node, actor)
        self._waiters.wake("makers", "work")
        return None

    async def maker_alive(self, maker: str) -> None:
        """Record a heartbeat of a maker."""
        self._makers.record_heartbeat(maker)

    async def next_work(self, maker: str, timeout_seconds: float, num_running: int = 0) -> Work | None:
        """Wait for the next work of a maker that runs `num_running` batches. Returns None after the timeout."""
        is_idle = not num_running
        self._makers.record_heartbeat(maker)
        if is_idle:
            self._makers.set_waiting(maker, "nothing to do")
        work = await self._waiters.until("work", lambda: self._find_work(maker, is_idle), timeout_seconds)
        if work is not None:
            self._makers.set_working(maker, str(work))
        return work

    async def submit(self, maker: str, era: int, groups: Sequence[StoredGroup], times: PhaseTimes) -> int:
        """Take finished groups and return the number of accepted groups.

        A group is rejected if another maker submitted it first, or if it was requested before a rollback (`era`).
        """
        self._makers.add_groups(maker, len(groups))
        if era != self._era:
            return 0
        self._times.add(times)
        num_accepted = 0
        for group in groups:
            accepted = self._prompts.submit(group, keep=group.keep, success=group.success)
            self._arrivals[group.position] = time.monotonic()
            num_accepted += accepted
        if self._prompts.can_lease:
            self._waiters.wake("work")
        if self._prompts.next_is_ready:
            self._waiters.wake("samples")
        return num_accepted

    async def keep_maker_state(self, number: int, state: Mapping[str, Any]) -> None:
        """Store the state of the rewards and players of maker `number` as of the samples that it submits next."""
        self._maker_states.keep(number, state)

    async def maker_state_of(self, number: int) -> Mapping[str, Any]:
        """State from which maker `number` continues. Empty if it starts without one."""
        return self._maker_states.of(number)

    async def submit_evaluation(self, maker: str, work: EvaluationWork, rows: Sequence[EvaluationRow]) -> None:
        """Take the rows of one part of an evaluation."""
        self._makers.record_heartbeat(maker)
        self._evaluation.done(work, rows)
        self._waiters.wake("evaluation")

    # Called by trainers.

    async def wait_for_makers(self, timeout_seconds: float) -> None:
        """Wait until every maker has loaded its models. Raises `DeadlineError` after the timeout."""

        def is_ready() -> bool:
            return len(self._makers) >= self._num_makers

        if not await self._waiters.until("makers", is_ready, timeout_seconds):
            names = ", ".join(self._makers) or "none"
            raise DeadlineError(
                f"waited {timeout_seconds:g} s for {self._num_makers} makers to load their models (ready: {names})",
                where="start",
                hint="larger models need a larger transport.start_timeout_seconds",
            )

    async def take(self, episode: int, timeout_seconds: float, trainer: str = "") -> TakenEpisode:
        """Wait for all groups of an episode and return them. Every trainer rank calls this once per episode."""
        if trainer:
            self._trainers.set_waiting(trainer, f"samples of episode {episode + 1} are still missing")

        def is_ready() -> bool:
            return (self._taken is not None and self._taken[0] == episode) or self._prompts.ready(episode)

        if not await self._waiters.until("samples", is_ready, timeout_seconds):
            raise DeadlineError(
                f"waited {timeout_seconds:g} s for the samples of episode {episode}: {self._prompts.progress(episode)}",
                where="coordinator",
                hint="check the makers in the log. If they are slow, raise transport.episode_timeout_seconds",
            )
        if self._taken is None or self._taken[0] != episode:
            self._taken = (episode, self._take(episode))
            self._waiters.wake("work", "samples")
        if trainer:
            self._trainers.set_working(trainer, f"trains on episode {episode + 1}")
        return self._taken[1]

    async def give_back(self, episode: int, lost: Sequence[int]) -> None:
        """Take back the episode that was taken last. Its groups at the positions `lost` are generated again."""
        if self._taken is None or self._taken[0] != episode:
            return  # the run was rolled back in the meantime
        self._prompts.give_back(self._taken[1].groups, lost)
        self._times.add(self._taken_times)
        self._taken = None
        self._waiters.wake("work")

    async def makers(self) -> dict[str, Any]:
        """Return the registered makers: name -> handle."""
        return self._makers.handles()

    async def publish(
        self, version: int, calls: Sequence[Mapping[str, Any]] = (), updated: Iterable[str] = ()
    ) -> dict[str, Any]:
        """Record that the makers `updated` have `version`, so that prompts that waited for it may start.

        Args:
            version: The new policy version.
            calls: The calls that delivered it, for makers that start later.
            updated: Names of the makers that have it.

        Returns:
            Makers that registered in the meantime and need it: name -> handle.
        """
        if calls:
            self._newest = calls
            self._num_publications += 1
        for maker in updated:
            self._makers.set_version(maker, version)
        self._prompts.publish(version)
        self._is_published = True
        self._waiters.wake("work")
        return {name: actor for name, actor in self._makers.handles().items() if calls and name not in updated}

    async def evaluate(self, part_size: int, timeout_seconds: float) -> list[EvaluationRow]:
        """Have the makers answer the held-out prompts with the newest version, and return all rows."""
        self._evaluation.open(self._num_evaluation_prompts, part_size, self._prompts.version)
        self._waiters.wake("work")
        if not await self._waiters.until("evaluation", lambda: self._evaluation.complete, timeout_seconds):
            raise DeadlineError(
                f"waited {timeout_seconds:g} s for an evaluation: {self._evaluation.describe()}", where="evaluation"
            )
        return self._evaluation.rows()

    async def state(self) -> dict[str, Any]:
        """Return `RolloutCoordinator.state_dict` with stored groups."""
        return self._prompts.state_dict()

    async def load(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, after a start or a rollback. Rollouts wait until its weights are published."""
        self._prompts.load_state_dict(state)
        self._era += 1
        self._is_published = False
        self._taken = None
        self._arrivals.clear()
        self._times = PhaseTimes()

    async def maker_states(self) -> list[Mapping[str, Any]]:
        """Return the states of the makers' rewards and players, in the order of the makers."""
        return self._maker_states.all()

    async def give_maker_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Set the states from which the makers continue. Call after `load`."""
        self._maker_states.restore(states, self._num_makers)

    async def alive(self, trainer: str, pid: int, node: str) -> None:
        """Record a heartbeat of a trainer."""
        if trainer not in self._trainers:
            self._trainers.register(trainer, pid, node)
            self._trainers.set_working(trainer, "loads its models")
        self._trainers.record_heartbeat(trainer)

    async def interrupted(self) -> bool:
        """Whether the run should stop after its episode."""
        return self._is_interrupted

    # Called by all actors for hooks and logs, and by the driver.

    async def report(self, event: Event | LogLine, after: None = None) -> None:
        """Queue an event for the driver. `after`, the result of the sender's previous call, orders the calls."""
        self._events.append(event)
        self._waiters.wake("events")

    async def overview(self, timeout_seconds: float) -> Overview:
        """Return the run's current state: immediately if there are events, else after the timeout."""
        await self._waiters.until("events", lambda: len(self._events), timeout_seconds)
        events, self._events = self._events, []
        next_episode = 0 if self._taken is None else self._taken[0] + 1
        waiting = Counter(group.owner for group in self._prompts.waiting())
        return Overview(
            version=self._prompts.version,
            progress=self._describe_progress(next_episode),
            makers=self._makers.rows(waiting),
            trainers=self._trainers.rows(),
            queue=waiting.total(),
            stuck=self._makers.stuck(),
            silent=self._trainers.stuck(),
            events=events,
        )

    async def release(self, maker: str) -> int:
        """Reassign the prompts of a lost maker, including those whose samples were lost. Returns their number."""
        self._makers.forget(maker)
        self._evaluation.release(maker)
        lost = self._prompts.release(maker) + self._prompts.withdraw(lambda group: group.owner == maker)
        self._waiters.wake("work")
        return lost

    async def scale(self, num_makers: int) -> None:
        """Change the number of makers of the run."""
        self._num_makers = num_makers
        self._waiters.wake("makers")

    async def interrupt(self) -> None:
        """Stop the run after its episode."""
        self._is_interrupted = True

    async def finish(self) -> None:
        """End the run: makers get no more work."""
        self._is_over = True
        self._waiters.wake("work")

    def _find_work(self, maker: str, is_idle: bool) -> Work | None:
        if self._is_over:
            return RunOver()
        # A maker that was presumed dead may still have a call pending.
        if maker not in self._makers:
            return None
        why: str | None = "no weights have been published yet"
        if self._is_published:
            evaluation = self._evaluation.take(maker)
            if evaluation is not None:
                return evaluation
            if leases := self._prompts.lease(self._lease_size(), maker):
                positions = tuple(lease.position for lease in leases)
                records = tuple(lease.record for lease in leases if lease.record is not None)
                return RolloutWork(positions, self._prompts.version, self._era, records)
            why = self._prompts.why_closed()
        if is_idle:
            self._makers.set_waiting(maker, why or "nothing to do")
        return None

    def _lease_size(self) -> int:
        return self._prompts_per_lease or math.ceil(self._prompts_per_episode / max(1, self._num_makers))

    def _take(self, episode: int) -> TakenEpisode:
        groups = self._prompts.take(episode)
        now = time.monotonic()
        waited = [now - self._arrivals.pop(group.position) for group in groups if group.position in self._arrivals]
        share = 1 / max(1, self._num_makers)
        times = replace(self._times, rollout_s=self._times.rollout_s * share, reward_s=self._times.reward_s * share)
        times.forward_s *= share
        self._taken_times, self._times = self._times, PhaseTimes()
        metrics = {
            **self._prompts.take_metrics(),
            "transport/queue_s": math.fsum(waited) / max(1, len(waited)),
            "transport/maker_idle_fraction": self._makers.take_idle_fraction(),
            "transport/token_bytes": float(sum(group.token_bytes for group in groups)),
            "transport/text_bytes": float(sum(group.text_bytes for group in groups)),
        }
        return TakenEpisode(groups, times, metrics)

    def _describe_progress(self, episode: int) -> str:
        if self._is_over or self._prompts.finished:
            return "all episodes are sampled"
        return f"episode {episode + 1} of {self._num_episodes}: {self._prompts.progress(episode)}"
