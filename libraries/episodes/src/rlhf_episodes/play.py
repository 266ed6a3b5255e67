"""Playing many episodes at once: environments on an event loop of their own, one engine for all of them.

The engine is given, in rounds, every turn that is asked for. As long as the environments do not wait for anything, a
round begins when every open episode has asked for its turns, so what is in a round does not depend on timing. Once a
call of the environment has taken `PATIENCE_SECONDS`, the engine waits for nobody: it takes whoever is ready.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from typing import Any

from rlhf_core.errors import EpisodeError
from rlhf_core.protocols import RolloutEngine
from rlhf_core.rollout.answers import answers
from rlhf_core.rollout.player import TimedPlayer
from rlhf_core.rollout.row import Played
from rlhf_core.types import Completion, GenerationRequest, PhaseTimes, Prompt
from rlhf_core.util.bounded_thread import BoundedThread

from .attempt import EPISODE_TASK, Make, play_episode
from .clock import Clock
from .contract import Task
from .conversations import Conversations
from .endpoint import Endpoints
from .episode import Episode, Rules
from .idle import WatchedSelector
from .isolation.host import IsolatedEnvironments
from .workers import SPARE_THREADS, Workers

PATIENCE_SECONDS = 1.0
"""So long a round waits for environments before it goes on without them."""
_PROBE_SECONDS = 5.0
LEAVE_SECONDS = 2.0
"""So long environments that are no longer played may take to let go of what they hold."""
_POLL_SECONDS = 0.2
_CONNECTIONS, _CONNECTIONS_EACH = 256, 8
"""Connections to the endpoints of self-driven agents: a base, and more for each episode played at once."""


@dataclass(frozen=True, slots=True)
class _Turn:
    """A turn that an episode waits for."""

    request: GenerationRequest
    stop: tuple[str, ...]
    answer: asyncio.Future[Completion]


@dataclass(eq=False)
class EnvironmentPlayer(TimedPlayer):
    """Plays episodes of one environment with one engine."""

    make: Make | IsolatedEnvironments
    """Makes environments here, or in processes of their own, which `close` ends."""
    rules: Rules
    _: KW_ONLY
    name: str
    """How errors call the environment."""
    engine: RolloutEngine
    task: Callable[[Prompt, int], Task]
    """Of a prompt and a sample id."""
    times: PhaseTimes = field(default_factory=PhaseTimes)
    waits: bool = field(default=False, init=False)
    """Whether this environment's calls were found to take time."""

    def close(self) -> None:
        """End the processes of its environments, where they have some. It may not be playing."""
        if isinstance(self.make, IsolatedEnvironments):
            self.make.close()

    def play(self, samples: Sequence[tuple[Prompt, int]]) -> Iterator[Played]:
        """Play an episode for each (prompt, sample id); yields them as they end. Adds to `times`.

        Raises `EpisodeError` where an episode fails and the run is to end by that, or the environment blocks.
        """
        session = _Session(self, samples)
        try:
            while not session.over:
                yield from session.take_played()
                waited = time.perf_counter()
                while not self.waits and not session.wait_for_all(PATIENCE_SECONDS):
                    self.waits = not session.is_starting  # a process that starts says nothing of environments' calls
                turns = session.take_turns(self.rules.options.timeout_seconds)
                self.times.environment_s += time.perf_counter() - waited
                turns.sort(key=lambda turn: (turn.stop, turn.request.sample_id, turn.request.branch))
                for stop, part in groupby(turns, key=attrgetter("stop")):  # those are sampled together
                    yield from self._answer(session, list(part), stop)
            yield from session.take_played()
        finally:
            session.close()

    def _answer(self, session: _Session, turns: Sequence[_Turn], stop: tuple[str, ...]) -> Iterator[Played]:
        sampling = self.rules.sampling
        sampling = replace(sampling, stop=(*sampling.stop, *(text for text in stop if text not in sampling.stop)))
        for turn, completion in answers(self.engine, [(turn.request, turn) for turn in turns], sampling, self.times):
            session.answer(turn, completion)
        yield from session.take_played()


class _Session:
    """The episodes of one `play`: an event loop on a thread, and what it shares with the engine's thread."""

    def __init__(self, player: EnvironmentPlayer, samples: Sequence[tuple[Prompt, int]]) -> None:
        self._player = player
        self._options = options = player.rules.options
        self._changed = threading.Condition()
        self._queue = deque(samples)
        self._plays: set[asyncio.Task[None]] = set()
        self._isolated = player.make if isinstance(player.make, IsolatedEnvironments) else None
        if self._isolated:
            self._isolated.begin()
        self._open = min(options.concurrency, len(samples))
        self._asked: Counter[int] = Counter()
        """Sample id -> turns that its episode waits for; only of those that wait."""
        self._handed = self._received = 0
        """Turns given to the loop, and turns it has taken up."""
        self._idle = False
        self._closing = False
        self._turns: list[_Turn] = []
        self._answered: list[tuple[_Turn, Completion]] = []
        self._played: list[Played] = []
        self._error: BaseException | None = None
        self._loop = asyncio.SelectorEventLoop(WatchedSelector(self._loop_waits))
        self._endpoints = Endpoints(
            Conversations, max_connections=_CONNECTIONS + _CONNECTIONS_EACH * options.concurrency
        )
        name = f"environment {player.name}"
        self._workers = Workers(self._loop, options.concurrency + SPARE_THREADS, name)
        self._thread = BoundedThread(self._serve, name)
        self._hand(self._begin, self._open)
        self._thread.start()

    @property
    def over(self) -> bool:
        with self._changed:
            return not (self._open or self._error)

    def take_played(self) -> list[Played]:
        """Episodes that ended since the last call. Raises what ended the run."""
        with self._changed:
            if self._error is not None:
                raise self._error
            played, self._played = self._played, []
        return played

    @property
    def is_starting(self) -> bool:
        """Whether a process of the environments is being started."""
        return self._isolated is not None and self._isolated.num_starting > 0

    def wait_for_all(self, seconds: float) -> bool:
        """Whether every open episode has asked for its turns within so many seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_settled() or not self._open or self._error, seconds) is True

    def _is_settled(self) -> bool:
        # An episode may ask for turns of several branches: all that will be asked for is there once the loop waits.
        return self._idle and self._handed == self._received and len(self._asked) == self._open

    def take_turns(self, timeout_seconds: float) -> list[_Turn]:
        """The turns that are asked for, as soon as there is one; none when no episode is open.

        Raises `EpisodeError` where the environment blocks its event loop for longer than its deadline.
        """
        alive = time.monotonic()
        with self._changed:
            while not (self._turns or self._error or not self._open):
                if self._changed.wait(_POLL_SECONDS):
                    continue
                if time.monotonic() - alive > timeout_seconds + _PROBE_SECONDS:
                    self._check_loop()
                    alive = time.monotonic()
            turns, self._turns = self._turns, []
        return turns

    def _check_loop(self) -> None:
        answered = threading.Event()
        self._loop.call_soon_threadsafe(answered.set)
        self._changed.release()
        try:
            blocked = not answered.wait(_PROBE_SECONDS)
        finally:
            self._changed.acquire()
        if blocked:
            raise EpisodeError(
                f"blocks: a coroutine of it has not given way for {self._options.timeout_seconds:g} s",
                where=f"environment {self._player.name}",
                hint="await in it, or write its methods as plain functions, which run on threads",
            )

    def answer(self, turn: _Turn, completion: Completion) -> None:
        """Let its episode go on. What comes while the loop is busy reaches it together."""
        with self._changed:
            self._answered.append((turn, completion))
            is_first = len(self._answered) == 1
        if is_first:
            self._hand(self._tell)

    def _hand(self, function: Callable[..., None], *args: Any) -> None:
        with self._changed:
            self._handed += 1
        self._loop.call_soon_threadsafe(self._receive, function, *args)

    def close(self) -> None:
        with self._changed:
            self._closing = True
        self._loop.call_soon_threadsafe(self._stop)
        self._thread.join(_PROBE_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()
        self._workers.close()

    # What follows runs on the loop.

    def _serve(self) -> None:
        while True:
            try:
                self._loop.run_forever()
            except (SystemExit, KeyboardInterrupt):  # of a task, and for whoever awaits it: it goes through the loop
                continue
            except Exception as error:  # of the loop, as when memory runs out
                self._end(None, error)
            else:
                self._loop.close()
            return

    def _loop_waits(self, waits: bool) -> None:
        with self._changed:
            self._idle = waits
            self._changed.notify_all()

    def _receive(self, function: Callable[..., None], *args: Any) -> None:
        with self._changed:
            self._received += 1
        function(*args)

    def _tell(self) -> None:
        with self._changed:
            answered, self._answered = self._answered, []
        for turn, completion in answered:
            if not turn.answer.done():
                turn.answer.set_result(completion)

    def _begin(self, count: int) -> None:
        for _ in range(count):
            prompt, sample_id = self._queue.popleft()
            playing = self._loop.create_task(self._play(self._player.task(prompt, sample_id)))
            self._plays.add(playing)
            playing.add_done_callback(self._plays.discard)

    async def _play(self, task: Task) -> None:
        try:
            make: Make = self._isolated.make if self._isolated else self._player.make  # type: ignore[assignment]
            name = self._player.name
            played = await play_episode(task, self._episode, make, self._options, self._workers, name)
        except BaseException as error:  # raised again where the episodes are awaited
            self._end(None, error)
        else:
            self._end(played, None)

    def _episode(self, task: Task, clock: Clock) -> Episode:
        return Episode(self._player.rules, task, self._ask, clock, self._endpoints)

    async def _ask(self, request: GenerationRequest, stop: tuple[str, ...]) -> Completion:
        turn = _Turn(request, stop, self._loop.create_future())
        with self._changed:
            self._turns.append(turn)
            self._asked[request.sample_id] += 1
            self._changed.notify_all()
        try:
            return await turn.answer
        finally:
            with self._changed:
                self._turns = [each for each in self._turns if each is not turn]
                self._asked[request.sample_id] -= 1
                if not self._asked[request.sample_id]:
                    del self._asked[request.sample_id]

    def _end(self, played: Played | None, error: BaseException | None) -> None:
        with self._changed:
            if played is not None:
                self._played.append(played)
            if error is not None and not self._closing:
                self._error = self._error or error
            goes_on = bool(self._queue) and error is None
            self._open -= not goes_on
            self._changed.notify_all()
        if goes_on:
            self._begin(1)

    def _stop(self) -> None:
        self._endpoints.close()
        self._queue.clear()
        for task in self._plays:
            task.cancel()
        self._loop.create_task(self._leave())

    async def _leave(self) -> None:
        """Let environments close what they hold in their `finally`, with the tasks that they need for it; then stop."""
        if episodes := {task for task in asyncio.all_tasks() if task.get_name() == EPISODE_TASK}:
            await asyncio.wait(episodes, timeout=LEAVE_SECONDS)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        if self._isolated is not None:
            self._isolated.leave()
        # One more turn of the loop lets them end.
        self._loop.call_soon(self._loop.call_soon, self._loop.stop)
