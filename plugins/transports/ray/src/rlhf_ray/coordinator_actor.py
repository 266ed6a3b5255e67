"""`Coordinator`: the central actor of a run, which all others talk to.

It owns the prompts (core's `RolloutCoordinator`), the parts of an evaluation and the events for the driver; it keeps
the calls that deliver the newest weights, for makers that start later. It never computes and never waits for another
actor, so it always answers; a caller whose request cannot be met yet waits here, with a deadline. It imports neither
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
    """An asyncio actor: every method is quick, or awaits a change of state."""

    def __init__(
        self,
        config: RayConfig,
        *,
        num_makers: int,
        num_episodes: int,
        prompts_per_episode: int,
        sampler: Sampler | None = None,
    ) -> None:
        """num_makers: at the start; see `scale`. sampler: draws the records of prompts, where the run has one."""
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
        """Calls of `update_experience_maker` that bring the newest version."""
        self._num_publications = 0
        self._evaluation = EvaluationJobs()
        self._num_evaluation_prompts = 0
        self._published = False
        self._era = 0
        self._over = False
        self._interrupted = False
        self._handed: tuple[int, TakenEpisode] | None = None
        self._arrived: dict[int, float] = {}
        self._times = PhaseTimes()
        self._handed_times = PhaseTimes()
        """Times of the episode that was handed out last."""
        self._events: list[Event | LogLine] = []
        self._maker_states = MakerStates()

    # Called by makers.

    async def register(
        self, maker: str, pid: int, node: str, num_evaluation_prompts: int, actor: Any = None, has: int = 0
    ) -> tuple[int, Sequence[Mapping[str, Any]]] | None:
        """Register a maker whose models are loaded: it may ask for work, and trainers send it new weights.

        has: number of the publication whose weights it has. Without the newest it is not registered: the result is
        that publication's number, and the calls of `update_experience_maker` that deliver it.
        """
        if has != self._num_publications:
            return self._num_publications, self._newest
        self._num_evaluation_prompts = num_evaluation_prompts
        self._makers.register(maker, pid, node, actor)
        self._waiters.wake("makers", "work")
        return None

    async def maker_alive(self, maker: str) -> None:
        """Heartbeat of a maker."""
        self._makers.seen(maker)

    async def next_work(self, maker: str, timeout_seconds: float, under_way: int = 0) -> Work | None:
        """The maker's next work, beside so many that it is doing; None when there was none within the timeout."""
        is_idle = not under_way
        self._makers.seen(maker)
        if is_idle:
            self._makers.waits(maker, "nothing to do")
        work = await self._waiters.until("work", lambda: self._find_work(maker, is_idle), timeout_seconds)
        if work is not None:
            self._makers.works(maker, str(work))
        return work

    async def submit(self, maker: str, era: int, groups: Sequence[StoredGroup], times: PhaseTimes) -> int:
        """Take finished groups; returns how many were accepted.

        A group is refused if another maker made it first, or if it was requested before a rollback (`era`).
        """
        self._makers.made(maker, len(groups))
        if era != self._era:
            return 0
        self._times.add(times)
        wanted = 0
        for group in groups:
            accepted = self._prompts.submit(group, keep=group.keep, success=group.success)
            self._arrived[group.position] = time.monotonic()
            wanted += accepted
        if self._prompts.can_lease:
            self._waiters.wake("work")
        if self._prompts.next_is_ready:
            self._waiters.wake("samples")
        return wanted

    async def keep_maker_state(self, number: int, state: Mapping[str, Any]) -> None:
        """Take the state of rewards and players of maker `number`, as it is after the samples that it sends next."""
        self._maker_states.keep(number, state)

    async def maker_state_of(self, number: int) -> Mapping[str, Any]:
        """State from which maker `number` continues; empty if it starts without one."""
        return self._maker_states.of(number)

    async def submit_evaluation(self, maker: str, work: EvaluationWork, rows: Sequence[EvaluationRow]) -> None:
        self._makers.seen(maker)
        self._evaluation.done(work, rows)
        self._waiters.wake("evaluation")

    # Called by trainers.

    async def wait_for_makers(self, timeout_seconds: float) -> None:
        """Return once every maker has its models loaded."""

        def ready() -> bool:
            return len(self._makers) >= self._num_makers

        if not await self._waiters.until("makers", ready, timeout_seconds):
            there = ", ".join(self._makers) or "none"
            raise DeadlineError(
                f"waited {timeout_seconds:g} s for {self._num_makers} makers to load their models; ready: {there}",
                where="start",
                hint="larger models need a larger transport.start_timeout_seconds",
            )

    async def take(self, episode: int, timeout_seconds: float, trainer: str = "") -> TakenEpisode:
        """The groups of an episode, once all have arrived; every trainer rank asks for each episode once."""
        if trainer:
            self._trainers.waits(trainer, f"the samples of episode {episode + 1} are not all there")

        def ready() -> bool:
            return (self._handed is not None and self._handed[0] == episode) or self._prompts.ready(episode)

        if not await self._waiters.until("samples", ready, timeout_seconds):
            raise DeadlineError(
                f"waited {timeout_seconds:g} s for the samples of episode {episode}: {self._prompts.progress(episode)}",
                where="coordinator",
                hint="see what the makers did in the log; slow ones need a larger transport.episode_timeout_seconds",
            )
        if self._handed is None or self._handed[0] != episode:
            self._handed = (episode, self._take(episode))
            self._waiters.wake("work", "samples")
        if trainer:
            self._trainers.works(trainer, f"trains on episode {episode + 1}")
        return self._handed[1]

    async def give_back(self, episode: int, lost: Sequence[int]) -> None:
        """Take back an episode that was just handed out; its groups at the positions `lost` are made again."""
        if self._handed is None or self._handed[0] != episode:
            return  # the run went back to a checkpoint meanwhile
        self._prompts.give_back(self._handed[1].groups, lost)
        self._times.add(self._handed_times)
        self._handed = None
        self._waiters.wake("work")

    async def makers(self) -> dict[str, Any]:
        """Name -> handle of the registered makers."""
        return self._makers.handles()

    async def publish(
        self, version: int, calls: Sequence[Mapping[str, Any]] = (), told: Iterable[str] = ()
    ) -> dict[str, Any]:
        """Note that the makers `told` have `version`: prompts that waited for it may start.

        calls: the calls that delivered it, for makers that start later. Returns makers that registered meanwhile.
        """
        if calls:
            self._newest = calls
            self._num_publications += 1
        for maker in told:
            self._makers.has_version(maker, version)
        self._prompts.publish(version)
        self._published = True
        self._waiters.wake("work")
        return {name: actor for name, actor in self._makers.handles().items() if calls and name not in told}

    async def evaluate(self, part_size: int, timeout_seconds: float) -> list[EvaluationRow]:
        """Have the held-out prompts answered with the newest version."""
        self._evaluation.open(self._num_evaluation_prompts, part_size, self._prompts.version)
        self._waiters.wake("work")
        if not await self._waiters.until("evaluation", lambda: self._evaluation.complete, timeout_seconds):
            raise DeadlineError(
                f"waited {timeout_seconds:g} s for an evaluation: {self._evaluation.describe()}", where="evaluation"
            )
        return self._evaluation.rows()

    async def state(self) -> dict[str, Any]:
        """`RolloutCoordinator.state_dict` with stored groups."""
        return self._prompts.state_dict()

    async def load(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, at the start or after a rollback; rollouts wait until its weights are published."""
        self._prompts.load_state_dict(state)
        self._era += 1
        self._published = False
        self._handed = None
        self._arrived.clear()
        self._times = PhaseTimes()

    async def maker_states(self) -> list[Mapping[str, Any]]:
        """State of the makers' rewards and players, in the order of the makers."""
        return self._maker_states.all()

    async def give_maker_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Have the makers continue from `states`, after `load`."""
        self._maker_states.restore(states, self._num_makers)

    async def alive(self, trainer: str, pid: int, node: str) -> None:
        """Heartbeat of a trainer."""
        if trainer not in self._trainers:
            self._trainers.register(trainer, pid, node)
            self._trainers.works(trainer, "loads its models")
        self._trainers.seen(trainer)

    async def interrupted(self) -> bool:
        return self._interrupted

    # Called for hooks and logs by all actors, and by the driver.

    async def report(self, event: Event | LogLine, after: None = None) -> None:
        """Queue an event for the driver. after: the result of the sender's call before this one."""
        self._events.append(event)
        self._waiters.wake("events")

    async def overview(self, timeout_seconds: float) -> Overview:
        """The run's current state; returned at once where there are events, else after the timeout."""
        await self._waiters.until("events", lambda: len(self._events), timeout_seconds)
        events, self._events = self._events, []
        next_episode = 0 if self._handed is None else self._handed[0] + 1
        waiting = Counter(group.owner for group in self._prompts.waiting())
        return Overview(
            version=self._prompts.version,
            progress=self._describe(next_episode),
            makers=self._makers.rows(waiting),
            trainers=self._trainers.rows(),
            queue=waiting.total(),
            stuck=self._makers.stuck(),
            silent=self._trainers.stuck(),
            events=events,
        )

    async def release(self, maker: str) -> int:
        """Reassign the prompts of a lost maker to others, those whose samples went with it too. Returns how many."""
        self._makers.forget(maker)
        self._evaluation.release(maker)
        lost = self._prompts.release(maker) + self._prompts.withdraw(lambda group: group.owner == maker)
        self._waiters.wake("work")
        return lost

    async def scale(self, num_makers: int) -> None:
        """The run is to have so many makers from now on."""
        self._num_makers = num_makers
        self._waiters.wake("makers")

    async def interrupt(self) -> None:
        self._interrupted = True

    async def finish(self) -> None:
        """End the run's work: makers get no more."""
        self._over = True
        self._waiters.wake("work")

    def _find_work(self, maker: str, is_idle: bool) -> Work | None:
        if self._over:
            return RunOver()
        # A maker taken for dead may still have a call pending.
        if maker not in self._makers:
            return None
        why: str | None = "no weights were published yet"
        if self._published:
            evaluation = self._evaluation.take(maker)
            if evaluation is not None:
                return evaluation
            if leases := self._prompts.lease(self._lease_size(), maker):
                positions = tuple(lease.position for lease in leases)
                records = tuple(lease.record for lease in leases if lease.record is not None)
                return RolloutWork(positions, self._prompts.version, self._era, records)
            why = self._prompts.why_closed()
        if is_idle:
            self._makers.waits(maker, why or "nothing to do")
        return None

    def _lease_size(self) -> int:
        return self._prompts_per_lease or math.ceil(self._prompts_per_episode / max(1, self._num_makers))

    def _take(self, episode: int) -> TakenEpisode:
        groups = self._prompts.take(episode)
        now = time.monotonic()
        waited = [now - self._arrived.pop(group.position) for group in groups if group.position in self._arrived]
        share = 1 / max(1, self._num_makers)
        times = replace(self._times, rollout_s=self._times.rollout_s * share, reward_s=self._times.reward_s * share)
        times.forward_s *= share
        self._handed_times, self._times = self._times, PhaseTimes()
        metrics = {
            **self._prompts.take_metrics(),
            "transport/queue_s": math.fsum(waited) / max(1, len(waited)),
            "transport/maker_idle_fraction": self._makers.take_idle_fraction(),
            "transport/token_bytes": float(sum(group.token_bytes for group in groups)),
            "transport/text_bytes": float(sum(group.text_bytes for group in groups)),
        }
        return TakenEpisode(groups, times, metrics)

    def _describe(self, episode: int) -> str:
        if self._over or self._prompts.finished:
            return "all episodes are sampled"
        return f"episode {episode + 1} of {self._num_episodes}: {self._prompts.progress(episode)}"
