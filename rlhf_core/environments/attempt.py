"""One episode from its seeds to its rows: played, timed, and played again where it fails."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..config.sections import EnvironmentConfig
from ..errors import EpisodeError, RlhfError
from ..types import Prompt
from ..util.printable import printable
from .contract import Environment, EpisodeTruncated, Outcome, Policy, Task
from .episode import Episode
from .metrics import OWN
from .row import Row
from .workers import Workers

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Played:
    """An episode that ended."""

    prompt: Prompt
    sample_id: int
    rows: tuple[Row, ...]
    """By branch; none where the episode is left out."""
    reward: float = 0.0
    """The outcome's and the turns' rewards together, raw."""
    turn_rewards: dict[int, float] = field(default_factory=dict)
    """Number of the turn -> its reward."""
    measured: dict[str, float] = field(default_factory=dict)
    """Of `environments.metrics`."""


class Clock:
    """Cancels an episode whose environment takes longer than its deadline for one call."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._task = asyncio.current_task()
        self._loop = asyncio.get_running_loop()
        self._handle: asyncio.TimerHandle | None = None
        self.passed = False
        self.doing = "run"
        """What the environment was asked for last."""

    def start(self) -> None:
        """The environment's time begins (again)."""
        self.stop()
        self._handle = self._loop.call_later(self._seconds, self._pass)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _pass(self) -> None:
        self.passed = True
        if self._task is not None:
            self._task.cancel()


class Caller:
    """Calls a stranger's function, plain or async, under the episode's clock."""

    def __init__(self, clock: Clock, workers: Workers) -> None:
        self._clock = clock
        self._workers = workers

    async def __call__(self, what: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What the function gives; `what` names the call in errors. A plain function runs on a thread."""
        self._clock.doing = what
        self._clock.start()
        if inspect.iscoroutinefunction(function):
            return await function(*args, **kwargs)
        found = await self._workers.submit(partial(function, *args, **kwargs))
        return await found if asyncio.iscoroutine(found) else found


Make = Callable[[Caller], Awaitable[Environment]]
"""A new environment for one episode, in the form that core drives; it calls a stranger's methods by the `Caller`."""


async def play_episode(
    task: Task,
    open_episode: Callable[[Task, Clock], Episode],
    make: Make,
    options: EnvironmentConfig,
    workers: Workers,
    name: str,
) -> Played:
    """Play it, at most `options.retries` times more where the environment fails.

    Raises `EpisodeError` where it still fails and `options.on_failure` is `fail`.
    """
    for attempt in range(options.retries + 1):
        clock = Clock(options.timeout_seconds)
        episode = open_episode(task, clock)
        try:
            outcome = await _run(make, Caller(clock, workers), episode, clock)
            return _played(task, episode, outcome)
        except RlhfError:
            raise
        except (Exception, asyncio.CancelledError) as error:  # a stranger's environment may raise anything
            if isinstance(error, asyncio.CancelledError) and not clock.passed:
                raise  # the run is ending
            failure = _failure(error, clock, task, name, options)
        finally:
            clock.stop()
        logger.warning("%s (attempt %d of %d)", failure, attempt + 1, options.retries + 1)
    if options.on_failure == "fail":
        raise failure
    if options.on_failure == "drop" or not any(row.turn_ends for row in episode.rows):
        return Played(task.prompt, task.sample_id, ())
    return _played(task, episode, Outcome(status="failed"))


async def _run(make: Make, call: Caller, episode: Episode, clock: Clock) -> Outcome:
    environment = await make(call)
    policy: Policy = episode.policy()
    clock.doing = "run"
    clock.start()
    try:
        outcome = await environment.run(episode.task, policy)
    except EpisodeTruncated:
        return Outcome(status="truncated")
    return _checked(outcome)


def _checked(outcome: object) -> Outcome:
    """Raises `TypeError` or `ValueError` for what is no outcome."""
    if not isinstance(outcome, Outcome):
        raise TypeError(f"run() gave a {type(outcome).__name__}, not an Outcome")
    numbers = {"reward": outcome.reward, **{f"the reward of turn {n}": r for n, r in outcome.turn_rewards.items()}}
    for what, value in {**numbers, **outcome.metrics}.items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{what} is {value!r}, not a finite number")
    return outcome


def _failure(error: BaseException, clock: Clock, task: Task, name: str, options: EnvironmentConfig) -> EpisodeError:
    if clock.passed:
        what = f"{clock.doing} gave no answer within {options.timeout_seconds:g} s"
        hint = "raise environment.timeout_seconds, or set environment.on_failure to zero or drop"
    else:
        what = f"{clock.doing} raised {type(error).__name__}: {printable(str(error))}"
        hint = "mend it, or set environment.on_failure to zero or drop"
    return EpisodeError(what, where=f"environment {name}, sample {task.sample_id}", hint=hint)


def _played(task: Task, episode: Episode, outcome: Outcome) -> Played:
    rows = tuple(row for row in episode.rows if row.turn_ends)
    for row in rows:
        row.drop_last_observation()
    if rows and outcome.status == "truncated":
        rows[-1].finish_reason = "length"
    failed = outcome.status == "failed"
    turn_rewards = {} if failed else {turn: float(reward) for turn, reward in outcome.turn_rewards.items()}
    unknown = sorted(turn for turn in turn_rewards if not 0 <= turn < episode.num_turns)
    if unknown:
        raise EpisodeError(
            f"rewards turn {unknown[0]}, but there were {episode.num_turns}", where=f"sample {task.sample_id}"
        )
    reward = 0.0 if failed else math.fsum([outcome.reward, *turn_rewards.values()])
    response = sum(len(row.ids) for row in rows)
    given = sum(len(turn.token_ids) for row in rows for turn in row.turns if turn.role == "environment")
    measured = {
        "num_turns": float(episode.num_turns),
        "truncated": float(outcome.status == "truncated"),
        "failed": float(failed),
        "bad_tool_calls": float(episode.bad_tool_calls),
        "observation_tokens": float(given),
        "response_tokens": float(response),
        **{OWN + name: float(value) for name, value in outcome.metrics.items()},
    }
    return Played(task.prompt, task.sample_id, rows, reward, turn_rewards, measured)
