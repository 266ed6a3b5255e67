"""Plays many episodes at once: environments run on one event loop and share one engine.

A run may have several environments, each with its own options. Their turns share the batches of the engine.

The engine samples the requested turns in rounds. While the environment's calls are fast, a round starts when every open
episode has requested its turns, so the contents of a round do not depend on timing. Once a call has taken longer than
`PATIENCE_SECONDS`, rounds no longer wait: each contains the turns that are ready.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any

from rlhf_core.errors import EpisodeError
from rlhf_core.protocols import RolloutEngine
from rlhf_core.rollout.player import TimedPlayer
from rlhf_core.rollout.row import Played
from rlhf_core.types import Completion, GenerationRequest, PhaseTimes, Prompt
from rlhf_core.util.bounded_thread import BoundedThread

from .attempt import EPISODE_TASK, MakeEnvironment, play_episode
from .clock import Clock
from .contract import Task
from .conversations import Conversations
from .endpoint import Endpoints
from .episode import Episode
from .idle import WatchedSelector
from .journal.replay import recorded_answers, recorded_episode
from .journal.turn_journal import TurnJournal
from .playable import Playable, mark
from .scoring import Scoring
from .section import EnvironmentConfig
from .workers import SPARE_THREADS, Workers

PATIENCE_SECONDS = 1.0
"""Maximum time that a round waits for environments."""
_PROBE_SECONDS = 5.0
LEAVE_SECONDS = 2.0
"""Grace period for abandoned environments to release resources."""
_POLL_SECONDS = 0.2
_CONNECTIONS, _CONNECTIONS_EACH = 256, 8
"""Maximum connections to the endpoints: a base, and more for each concurrent episode."""


@dataclass(frozen=True, slots=True)
class _Turn:
    """A turn requested by an episode."""

    request: GenerationRequest
    stop: tuple[str, ...]
    completion: asyncio.Future[Completion]


def _first(prompt: Prompt) -> int:
    return 0


@dataclass(eq=False)
class EnvironmentPlayer(TimedPlayer):
    """Plays episodes of one or several environments with one engine."""

    environments: Sequence[Playable]
    """At least one. All have the same sampling parameters."""
    _: KW_ONLY
    engine: RolloutEngine
    task: Callable[[Prompt, int], Task]
    """Returns the task for a prompt and a sample id."""
    choose: Callable[[Prompt], int] = _first
    """Returns the index of the environment that plays a prompt. Depends only on the prompt, so that the samples of a
    group are played in one environment."""
    times: PhaseTimes = field(default_factory=PhaseTimes)
    journal: TurnJournal | None = None
    """Records turns and episodes in the run folder, and has those of earlier attempts. None without a record."""
    is_slow: bool = field(default=False, init=False)
    """Whether a call has taken longer than `PATIENCE_SECONDS`, so that rounds no longer wait for all episodes."""

    def close(self) -> None:
        """End the processes of isolated environments, and close rewards. Must not be called during `play`."""
        with ExitStack() as stack:
            for each in self.environments:
                for part in (each.isolated, each.maker, each.rewards):
                    if part is not None:
                        stack.callback(part.close)

    @property
    def name(self) -> str:
        """Names of the environments in errors."""
        return ", ".join(each.name for each in self.environments)

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of the environments in metrics."""
        return tuple(each.label for each in self.environments if each.label is not None)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the journal and of the environments' rewards, by label."""
        states = {each.label: each.rewards.state_dict() for each in self.environments if each.rewards is not None}
        rewards = {str(label): state for label, state in states.items() if state}
        own = {"rewards": rewards, "journal": {} if self.journal is None else self.journal.state_dict()}
        return {name: state for name, state in own.items() if state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        if self.journal is not None and (own := state.get("journal")) is not None:
            self.journal.load_state_dict(own)
        for each in self.environments:
            if each.rewards is not None and (own := state.get("rewards", {}).get(str(each.label))) is not None:
                each.rewards.load_state_dict(own)

    def play(self, samples: Sequence[tuple[Prompt, int]]) -> Iterator[Played]:
        """Play an episode for each (prompt, sample id) and yield them as they end. Adds to `times`.

        Raises `EpisodeError` if an episode fails with `on_failure: fail`, or if the environment blocks the event loop.
        """
        scoring = Scoring(self.times)
        for played in self._play(samples):
            environment = self.environments[self.choose(played.prompt)]
            if environment.rewards is None or not played.rows:
                yield played
            else:
                scoring.add(played, environment)
        yield from scoring.results()
        for environment in self.environments:
            if environment.rewards is not None:
                self.times.add(PhaseTimes(reward_calls=environment.rewards.take_costs(str(environment.label))))

    def _play(self, samples: Sequence[tuple[Prompt, int]]) -> Iterator[Played]:
        if self.journal is not None:
            self.journal.begin()
        for index in {self.choose(prompt) for prompt, _ in samples}:
            if (maker := self.environments[index].maker) is not None:
                maker.open()
        session = _Session(self, samples)
        try:
            while not session.is_over:
                yield from session.take_played()
                waited = time.perf_counter()
                while not self.is_slow and not session.wait_for_all(PATIENCE_SECONDS):
                    self.is_slow = not session.is_starting  # the start of a process is not a slow call
                turns = session.take_turns(max(each.options.timeout_seconds for each in self.environments))
                self.times.environment_s += time.perf_counter() - waited
                turns.sort(key=lambda turn: (turn.stop, turn.request.sample_id, turn.request.branch))
                for stop, part in groupby(turns, key=attrgetter("stop")):  # turns with equal stop texts share a batch
                    yield from self._sample(session, list(part), stop)
            yield from session.take_played()
        finally:
            session.close()

    def _sample(self, session: _Session, turns: Sequence[_Turn], stop: tuple[str, ...]) -> Iterator[Played]:
        sampling = self.environments[0].rules.sampling
        sampling = replace(sampling, stop=(*sampling.stop, *(text for text in stop if text not in sampling.stop)))
        pairs = [(turn.request, turn) for turn in turns]
        for turn, completion in recorded_answers(self.journal, self.engine, pairs, sampling, self.times):
            session.complete(turn, completion)
        yield from session.take_played()


class _Session:
    """Episodes of one call of `play`, run by an event loop in a thread, and state shared with the engine's thread."""

    def __init__(self, player: EnvironmentPlayer, samples: Sequence[tuple[Prompt, int]]) -> None:
        self._player = player
        self._environments = player.environments
        self._changed = threading.Condition()
        self._queues: list[deque[tuple[Prompt, int]]] = [deque() for _ in self._environments]
        """Samples of each environment that have not started."""
        for sample in samples:
            self._queues[player.choose(sample[0])].append(sample)
        self._plays: set[asyncio.Task[None]] = set()
        self._isolated = [each.isolated for each in self._environments if each.isolated is not None]
        for isolated in self._isolated:
            isolated.begin_session()
        starting = [
            min(each.options.concurrency, len(queue))
            for each, queue in zip(self._environments, self._queues, strict=True)
        ]
        self._num_open = sum(starting)
        self._num_waiting: Counter[int] = Counter()
        """Number of turns that each episode waits for, by sample id. Only episodes that wait are in it."""
        self._num_scheduled = self._num_run = 0
        """Number of functions scheduled on the loop, and number of those that it has run."""
        self._is_idle = False
        self._is_closing = False
        self._turns: list[_Turn] = []
        self._completed: list[tuple[_Turn, Completion]] = []
        self._played: list[Played] = []
        self._error: BaseException | None = None
        self._loop = asyncio.SelectorEventLoop(WatchedSelector(self._set_idle))
        concurrency = sum(each.options.concurrency for each in self._environments)
        self._endpoints = Endpoints(Conversations, max_connections=_CONNECTIONS + _CONNECTIONS_EACH * concurrency)
        name = f"environment {player.name}"
        self._workers = Workers(self._loop, concurrency + SPARE_THREADS, name)
        self._thread = BoundedThread(self._serve, name)
        for index, count in enumerate(starting):
            self._schedule(self._start_episodes, index, count)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        with self._changed:
            return not (self._num_open or self._error)

    def take_played(self) -> list[Played]:
        """Return the episodes that ended since the last call. Raises the error that ended the session."""
        with self._changed:
            if self._error is not None:
                raise self._error
            played, self._played = self._played, []
        return played

    @property
    def is_starting(self) -> bool:
        """Whether a process of isolated environments is being started."""
        return any(isolated.num_starting > 0 for isolated in self._isolated)

    def wait_for_all(self, seconds: float) -> bool:
        """Whether every open episode requests its turns within this time."""
        with self._changed:
            settled = self._changed.wait_for(lambda: self._is_settled() or not self._num_open or self._error, seconds)
            return settled is True

    def _is_settled(self) -> bool:
        # An episode may request turns of several branches. All of them have been requested once the loop is idle.
        return self._is_idle and self._num_scheduled == self._num_run and len(self._num_waiting) == self._num_open

    def take_turns(self, timeout_seconds: float) -> list[_Turn]:
        """Wait for requested turns and return all of them, or none if no episode is open.

        Raises `EpisodeError` if the environment blocks the event loop for longer than its deadline.
        """
        alive = time.monotonic()
        with self._changed:
            while not (self._turns or self._error or not self._num_open):
                if self._changed.wait(_POLL_SECONDS):
                    continue
                if time.monotonic() - alive > timeout_seconds + _PROBE_SECONDS:
                    self._check_loop(timeout_seconds)
                    alive = time.monotonic()
            turns, self._turns = self._turns, []
        return turns

    def _check_loop(self, timeout_seconds: float) -> None:
        responded = threading.Event()
        self._loop.call_soon_threadsafe(responded.set)
        self._changed.release()
        try:
            blocked = not responded.wait(_PROBE_SECONDS)
        finally:
            self._changed.acquire()
        if blocked:
            raise EpisodeError(
                f"a coroutine has blocked the event loop for {timeout_seconds:g} s",
                where=f"environment {self._player.name}",
                hint="use await in it, or make it a plain function, which runs on a thread",
            )

    def complete(self, turn: _Turn, completion: Completion) -> None:
        """Deliver a completion to its episode. Completions that arrive while the loop is busy are batched."""
        with self._changed:
            self._completed.append((turn, completion))
            is_first = len(self._completed) == 1
        if is_first:
            self._schedule(self._deliver)

    def _schedule(self, function: Callable[..., None], *args: Any) -> None:
        with self._changed:
            self._num_scheduled += 1
        self._loop.call_soon_threadsafe(self._run_scheduled, function, *args)

    def close(self) -> None:
        with self._changed:
            self._is_closing = True
        self._loop.call_soon_threadsafe(self._stop)
        self._thread.join(_PROBE_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()
        self._workers.close()

    # The methods below run on the loop.

    def _serve(self) -> None:
        while True:
            try:
                self._loop.run_forever()
            except (SystemExit, KeyboardInterrupt):  # from a task, whose awaiter gets it too
                continue
            except Exception as error:  # from the loop itself, for example if memory runs out
                self._end(None, None, error)
            else:
                self._loop.close()
            return

    def _set_idle(self, is_idle: bool) -> None:
        with self._changed:
            self._is_idle = is_idle
            self._changed.notify_all()

    def _run_scheduled(self, function: Callable[..., None], *args: Any) -> None:
        with self._changed:
            self._num_run += 1
        function(*args)

    def _deliver(self) -> None:
        with self._changed:
            completed, self._completed = self._completed, []
        for turn, completion in completed:
            if not turn.completion.done():
                turn.completion.set_result(completion)

    def _start_episodes(self, index: int, count: int) -> None:
        for _ in range(count):
            prompt, sample_id = self._queues[index].popleft()
            task = self._loop.create_task(self._play(index, self._player.task(prompt, sample_id)))
            self._plays.add(task)
            task.add_done_callback(self._plays.discard)

    async def _play(self, index: int, task: Task) -> None:
        environment = self._environments[index]
        isolated = environment.isolated
        make: MakeEnvironment = isolated.make if isolated else environment.make  # type: ignore[assignment]
        open_episode = partial(self._episode, environment)
        kinds = {**EnvironmentConfig.columns, **environment.rules.columns}
        try:
            name = environment.name
            play = partial(play_episode, task, open_episode, make, environment.options, self._workers, name)
            played = await recorded_episode(self._player.journal, task, kinds, play)
            played = mark(played, environment, self._player.labels)
        except BaseException as error:  # raised again by `take_played`
            self._end(index, None, error)
        else:
            self._end(index, played, None)

    def _episode(self, environment: Playable, task: Task, clock: Clock) -> Episode:
        progress = None if self._player.journal is None else self._player.journal.progress(task.sample_id)
        return Episode(environment.rules, task, self._sample_turn, clock, self._endpoints, self._workers, progress)

    async def _sample_turn(self, request: GenerationRequest, stop: tuple[str, ...]) -> Completion:
        turn = _Turn(request, stop, self._loop.create_future())
        with self._changed:
            self._turns.append(turn)
            self._num_waiting[request.sample_id] += 1
            self._changed.notify_all()
        try:
            return await turn.completion
        finally:
            with self._changed:
                self._turns = [each for each in self._turns if each is not turn]
                self._num_waiting[request.sample_id] -= 1
                if not self._num_waiting[request.sample_id]:
                    del self._num_waiting[request.sample_id]

    def _end(self, index: int | None, played: Played | None, error: BaseException | None) -> None:
        with self._changed:
            if played is not None:
                self._played.append(played)
            if error is not None and not self._is_closing:
                self._error = self._error or error
            has_next = index is not None and bool(self._queues[index]) and error is None
            self._num_open -= not has_next
            self._changed.notify_all()
        if has_next and index is not None:
            self._start_episodes(index, 1)

    def _stop(self) -> None:
        self._endpoints.close()
        for queue in self._queues:
            queue.clear()
        for task in self._plays:
            task.cancel()
        self._loop.create_task(self._shut_down())

    async def _shut_down(self) -> None:
        """Give environments time to run their `finally` blocks, then cancel all tasks and stop the loop."""
        if episodes := {task for task in asyncio.all_tasks() if task.get_name() == EPISODE_TASK}:
            await asyncio.wait(episodes, timeout=LEAVE_SECONDS)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        for isolated in self._isolated:
            isolated.end_session()
        if others:
            await asyncio.wait(others, timeout=LEAVE_SECONDS)
        self._loop.stop()
