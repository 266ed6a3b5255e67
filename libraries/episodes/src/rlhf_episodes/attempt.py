"""One episode from its seeds to its rows: played, timed, and played again where it fails."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from functools import partial
from numbers import Real
from typing import Any, get_args

from rlhf_core.columns import Column, Columns
from rlhf_core.errors import DataError, EpisodeError, RlhfError
from rlhf_core.rollout.episode_metrics import ENVIRONMENT, EPISODE_COLUMNS, OWN, RESERVED
from rlhf_core.rollout.row import Played, Row
from rlhf_core.util.error_text import error_text
from rlhf_core.util.redact import printable

from .clock import CallClock, Clock
from .contract import Environment, EpisodeTruncated, Outcome, Policy, Status, Task
from .episode import Episode
from .section import EnvironmentConfig
from .workers import Workers

logger = logging.getLogger(__name__)

EPISODE_TASK = "episode of an environment"
"""Name of the task in which an environment runs."""


class Caller:
    """Calls a stranger's function, plain or async, under the episode's clock."""

    def __init__(self, clock: CallClock, workers: Workers) -> None:
        self.clock = clock
        self._workers = workers

    async def __call__(self, name: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call the function and return its result; `name` is for errors. A plain function runs on a thread.

        Raises what the function does, or `EnvironmentFault` for what a coroutine must not raise.
        """
        self.clock.doing = name
        self.clock.start()
        if inspect.iscoroutinefunction(function):
            return await function(*args, **kwargs)
        found, error = await self._workers.submit(partial(_outcome_of, function, *args, **kwargs))
        if error is not None:
            raise error
        return await found if inspect.isawaitable(found) else found

    async def close(self, environment: object) -> None:
        """Have an environment let go of what it holds, where it has a `close`: a wrong one spoils no episode."""
        if callable(close := getattr(environment, "close", None)):
            doing = self.clock.doing
            try:
                await self("close", close)
            except Exception as error:  # a stranger's may raise anything
                logger.warning("close of an environment %s", said(error))
            self.clock.doing = doing  # what else is said of the episode is about that call
            self.clock.start()


def _outcome_of(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> tuple[Any, Exception | None]:
    """The function's result, or its error as a value: a future cannot hold every kind of error."""
    try:
        return function(*args, **kwargs), None
    except BaseException as error:  # a stranger's function may raise anything, SystemExit included
        is_plain = isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration)
        return None, error if is_plain else EnvironmentFault(said(error))  # type: ignore[return-value]


class EnvironmentFault(Exception):
    """An environment did what none may; the text says what."""


class EpisodeLost(Exception):
    """The process of an episode is gone, and that may not be the fault of this one: it is made again."""


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
    attempt = 0
    while attempt <= options.retries:
        clock = Clock(options.timeout_seconds)
        episode = open_episode(task, clock)
        try:
            outcome = await _within(clock, _run(make, Caller(clock, workers), episode))
            return _played(task, episode, outcome)
        except EpisodeLost:
            continue
        except (EpisodeError, DataError) as error:
            fault, hint = error.message, error.hint
        except RlhfError:
            raise  # the run itself is not as it should be
        except EnvironmentFault as error:
            fault, hint = f"{clock.doing} {error}", None
        except Exception as error:  # a stranger's environment may raise anything
            fault, hint = f"{clock.doing} {said(error)}", None
        finally:
            clock.stop()
            episode.close()
        where = f"environment {name}, sample {task.sample_id}"
        failure = EpisodeError(fault, where=where, hint=hint or "mend it, or set environment.on_failure: zero or drop")
        attempt += 1
        logger.warning("%s (attempt %d of %d)", failure, attempt, options.retries + 1)
    if options.on_failure == "fail":
        raise failure
    if options.on_failure == "drop" or not any(row.own_turns for row in episode.rows):
        return Played(task.prompt, task.sample_id, ())
    return _played(task, episode, Outcome(status="failed"))


async def _within(clock: Clock, run: Coroutine[Any, Any, Outcome]) -> Outcome:
    """Run it in a task of its own until it ends or the clock has passed.

    A run that passes it is cancelled and left behind, whether it ends or not. Raises what it raises, and
    `EpisodeError` where it was too slow or ended by a cancellation that nobody here asked for.
    """
    running = asyncio.get_running_loop().create_task(run, name=EPISODE_TASK)
    try:
        either: Iterable[asyncio.Future[Any]] = (running, clock.passed)
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    finally:
        running.cancel()
        running.add_done_callback(_forget)
    if clock.passed.done():
        raise EpisodeError(
            f"{clock.doing} gave no answer within {clock.seconds:g} s",
            where="environment.timeout_seconds",
            hint="raise environment.timeout_seconds, or set environment.on_failure: zero or drop",
        )
    if running.cancelled():
        raise EnvironmentFault("was cancelled by itself")
    return running.result()


def _forget(task: asyncio.Task[Outcome]) -> None:
    """Take the error of a run that may have been left behind: what it raises after that is told to nobody."""
    if not task.cancelled():
        task.exception()


async def _run(make: Make, call: Caller, episode: Episode) -> Outcome:
    """Run the environment of an episode; what it raises after its endpoint refused a call is an end by that bound."""
    try:
        return await run_environment(make, call, episode.task, episode.policy())
    except (RlhfError, EpisodeLost):
        raise
    except Exception as error:
        if not episode.was_refused:
            raise
        logger.info("sample %d is truncated: the endpoint refused a call, and %s", episode.task.sample_id, said(error))
        return Outcome(status="truncated")


async def run_environment(make: Make, call: Caller, task: Task, policy: Policy) -> Outcome:
    """The outcome of an environment, checked. Raises what it raises, and `EnvironmentFault` for what none may do."""
    try:
        environment = await make(call)
        call.clock.doing = "run"
        call.clock.start()
        return _checked(await environment.run(task, policy))
    except EpisodeTruncated:
        return Outcome(status="truncated")
    except (SystemExit, KeyboardInterrupt) as error:  # raised on, they would end the loop of all episodes
        raise EnvironmentFault(said(error)) from error


def said(error: BaseException) -> str:
    """The error's text, as the end of a sentence about the call that raised it."""
    return f"raised {printable(error_text(error, caller=__name__))}"


def _checked(found: object) -> Outcome:
    """An outcome with plain numbers. Raises `EnvironmentFault` for what is none, or says that it failed."""
    if not isinstance(found, Outcome):
        raise EnvironmentFault(f"gave a {type(found).__name__}, not an Outcome")
    if found.status not in get_args(Status):
        raise EnvironmentFault(f"gave the status {found.status!r:.100}, which is none of {', '.join(get_args(Status))}")
    if found.status == "failed":
        raise EnvironmentFault("says that the episode failed")
    taken = RESERVED.intersection(found.metrics)
    if taken:
        raise EnvironmentFault(f"measures {min(taken)}, which is the name of a metric of core's")
    try:
        columns = json.loads(json.dumps(dict(found.columns), default=lambda value: value.tolist(), allow_nan=False))
    except (AttributeError, TypeError, ValueError) as error:
        raise EnvironmentFault(
            f"gave columns that are not finite numbers: {error_text(error, caller=__name__)}"
        ) from None
    return Outcome(
        reward=_finite("the reward", found.reward),
        turn_rewards={
            int(turn): _finite(f"the reward of turn {turn}", each) for turn, each in found.turn_rewards.items()
        },
        metrics={str(name): _finite(f"the metric {name}", value) for name, value in found.metrics.items()},
        status=found.status,
        bad_tool_calls=int(_finite("the number of bad tool calls", found.bad_tool_calls)),
        columns=columns,
    )


def _finite(what: str, value: object) -> float:
    """Takes what is a number to any library."""
    if not (isinstance(value, Real) and math.isfinite(value)):
        raise EnvironmentFault(f"gave a number that is none: {what} is {value!r:.100}")
    return float(value)


def _played(task: Task, episode: Episode, outcome: Outcome) -> Played:
    """Raises `EpisodeError` where the policy had no turn, `EnvironmentFault` for an outcome of other turns."""
    for turn in outcome.turn_rewards:
        if turn not in range(episode.num_turns):
            raise EnvironmentFault(f"rewards turn {turn!r:.100}, but there were {episode.num_turns}")
    rows = tuple(row for row in episode.rows if row.own_turns)
    if not rows:
        raise EpisodeError(
            "the episode ended before the policy's first turn",
            where="environment",
            hint="see whether the prompt and the first observation leave room for an answer; "
            "environment.on_failure: drop leaves such episodes out",
        )
    for number, row in enumerate(rows):
        row.branch = number  # one whose only call was given up by its client has left a gap
        row.drop_last_observation()
    if outcome.status == "truncated":
        rows[-1].finish_reason = "length"
    response = sum(row.num_own for row in rows)
    measured = {
        "num_turns": float(episode.num_turns),
        "truncated": float(outcome.status == "truncated"),
        "failed": float(outcome.status == "failed"),
        "bad_tool_calls": float(episode.bad_tool_calls + outcome.bad_tool_calls),
        "observation_tokens": float(response - sum(sum(row.mask) for row in rows)),
        "response_tokens": float(response),
        **{OWN + name: value for name, value in outcome.metrics.items()},
    }
    _check_columns(outcome.columns, episode)
    reward = math.fsum([outcome.reward, *outcome.turn_rewards.values()])
    for row in rows:
        row.columns = Columns({ENVIRONMENT: measured if row is rows[0] else {}}, EPISODE_COLUMNS)
        row.columns |= _columns(row, outcome.columns, episode.rules.columns)
    return Played(task.prompt, task.sample_id, rows, reward, dict(outcome.turn_rewards))


def _check_columns(given: Mapping[str, Any], episode: Episode) -> None:
    """Raise `EnvironmentFault` for a column that is not declared, or one per token that is not given by turn."""
    turns = set(map(str, range(episode.num_turns)))
    for name, value in given.items():
        if (kind := episode.rules.columns.get(name)) is None:
            raise EnvironmentFault(f"gave a column {name!r:.100}, which it does not declare in `columns`")
        if kind.per == "token" and not (isinstance(value, dict) and value.keys() <= turns):
            raise EnvironmentFault(f"gave, as the column {name!r}, no values of its {len(turns)} turns: {value!r:.100}")


def _columns(row: Row, given: Mapping[str, Any], kinds: Mapping[str, Column]) -> Columns:
    """The environment's columns of a row. Raises `EnvironmentFault` for a turn without a value for each token."""
    kept = {name: kind for name, kind in kinds.items() if name in given or not kind.optional}
    values = {
        name: given.get(name, kind.fill if kind.per in ("sample", "prompt") else {}) for name, kind in kept.items()
    }
    for name, kind in kept.items():
        if kind.per == "token":
            values[name], turns = [kind.fill] * len(row.ids), values[name]
            for turn, end in row.turn_ends.items():
                size = len(row.turns[row.own_turns[turn]].token_ids)
                own = turns.get(str(turn), kind.fill)
                if isinstance(own, list) and len(own) != size:
                    problem = f"gave {len(own)} values of the column {name!r} for the {size} tokens of turn {turn}"
                    raise EnvironmentFault(problem)
                values[name][end + 1 - size : end + 1] = own if isinstance(own, list) else [own] * size
    return Columns(values, kinds)
