"""Play one episode: run its environment under a deadline, retry failures, and build the rows of its tokens."""

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
from rlhf_core.rollout.episode_metrics import ENVIRONMENT, OWN, RESERVED
from rlhf_core.rollout.row import Played, Row
from rlhf_core.util.error_text import error_text
from rlhf_core.util.redact import printable

from .clock import CallClock, Clock
from .contract import Environment, EpisodeTruncated, Outcome, Policy, Status, Task
from .episode import Episode
from .progress import EpisodeLost, Progress
from .section import TURN_NUMBER, EnvironmentConfig
from .sight import with_seen
from .workers import Workers

logger = logging.getLogger(__name__)

EPISODE_TASK = "episode of an environment"
"""Name of the asyncio task that runs an environment."""


class Caller:
    """Calls an environment's functions, plain or async, under the episode's clock."""

    def __init__(self, clock: CallClock, workers: Workers, progress: Progress | None = None) -> None:
        self.clock = clock
        self._workers = workers
        self.progress = progress or Progress()

    async def __call__(self, name: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call the function and return its result. A plain function runs on a thread. Errors contain `name`.

        Raises the function's errors. Those that a coroutine must not raise (`SystemExit`, `StopIteration`) become
        `EnvironmentFault`.
        """
        self.clock.call_name = name
        self.clock.start()
        if inspect.iscoroutinefunction(function):
            return await function(*args, **kwargs)
        result, error = await self._workers.submit(partial(_result_or_error, function, *args, **kwargs))
        if error is not None:
            raise error
        return await result if inspect.isawaitable(result) else result

    async def close(self, environment: object) -> None:
        """Call the environment's `close`, if it has one. Its errors are only logged."""
        if callable(close := getattr(environment, "close", None)):
            call_name = self.clock.call_name
            try:
                await self("close", close)
            except Exception as error:  # third-party code may raise anything
                logger.warning("close of an environment %s", describe_error(error))
            self.clock.call_name = call_name  # later errors are about the call before `close`
            self.clock.start()


def _result_or_error(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> tuple[Any, Exception | None]:
    """Call the function and return its result or its error, since a future cannot hold every kind of error."""
    try:
        return function(*args, **kwargs), None
    except BaseException as error:  # third-party code may raise anything, SystemExit included
        is_plain = isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration)
        return None, error if is_plain else EnvironmentFault(describe_error(error))  # type: ignore[return-value]


class EnvironmentFault(Exception):
    """An environment violated its contract. The text follows the name of the call: `returned a dict, not ...`."""


MakeEnvironment = Callable[[Caller], Awaitable[Environment]]
"""Creates the environment of one episode in the form that core drives. It calls user code through the `Caller`."""


async def play_episode(
    task: Task,
    open_episode: Callable[[Task, Clock], Episode],
    make: MakeEnvironment,
    options: EnvironmentConfig,
    workers: Workers,
    name: str,
) -> Played:
    """Play an episode, with at most `options.retries` more attempts if its environment fails.

    An attempt that continued from a recorded state and failed does not count.

    Raises `EpisodeError` if the last attempt fails and `options.on_failure` is `fail`.
    """
    attempt = 0
    while attempt <= options.retries:
        clock = Clock(options.timeout_seconds)
        episode = open_episode(task, clock)
        try:
            outcome = await _run_with_deadline(clock, _run(make, Caller(clock, workers, episode.progress), episode))
            return _build_played(task, episode, outcome)
        except EpisodeLost:
            continue
        except (EpisodeError, DataError) as error:
            fault, hint = error.message, error.hint
        except RlhfError:
            raise  # an error of the run, not of the environment
        except EnvironmentFault as error:
            fault, hint = f"{clock.call_name} {error}", None
        except Exception as error:  # third-party code may raise anything
            fault, hint = f"{clock.call_name} {describe_error(error)}", None
        finally:
            clock.stop()
            episode.close()
        where = f"environment {name}, sample {task.sample_id}"
        failure = EpisodeError(fault, where=where, hint=hint or "fix it, or set environment.on_failure: zero or drop")
        if episode.progress.steps:
            logger.warning("%s (the episode continued from a recorded state and now starts again)", failure)
            continue
        attempt += 1
        logger.warning("%s (attempt %d of %d)", failure, attempt, options.retries + 1)
    if options.on_failure == "fail":
        raise failure
    if options.on_failure == "drop" or not any(row.own_turns for row in episode.rows):
        return Played(task.prompt, task.sample_id, ())
    return _build_played(task, episode, Outcome(status="failed"))


async def _run_with_deadline(clock: Clock, run: Coroutine[Any, Any, Outcome]) -> Outcome:
    """Run an environment in its own task until it ends or its clock expires.

    After the clock expires, the task is canceled and not awaited, since it may never end. Raises the task's errors,
    `EpisodeError` if the clock expired, and `EnvironmentFault` if the environment canceled the task itself.
    """
    running = asyncio.get_running_loop().create_task(run, name=EPISODE_TASK)
    try:
        either: Iterable[asyncio.Future[Any]] = (running, clock.expired)
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    finally:
        running.cancel()
        running.add_done_callback(_discard_error)
    if clock.expired.done():
        raise EpisodeError(
            f"{clock.call_name} did not return within {clock.seconds:g} s",
            where="environment.timeout_seconds",
            hint="raise environment.timeout_seconds, or set environment.on_failure: zero or drop",
        )
    if running.cancelled():
        raise EnvironmentFault("canceled itself")
    return running.result()


def _discard_error(task: asyncio.Task[Outcome]) -> None:
    """Retrieve the error of a task that no one awaits, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()


async def _run(make: MakeEnvironment, call: Caller, episode: Episode) -> Outcome:
    """Run the environment of an episode. If it raises after its endpoint refused a call, the episode is truncated."""
    try:
        return await run_environment(make, call, episode.task, episode.policy())
    except (RlhfError, EpisodeLost):
        raise
    except Exception as error:
        if not episode.was_refused:
            raise
        problem = describe_error(error)
        logger.info("sample %d is truncated: the endpoint refused a call, and %s", episode.task.sample_id, problem)
        return Outcome(status="truncated")


async def run_environment(make: MakeEnvironment, call: Caller, task: Task, policy: Policy) -> Outcome:
    """Run an environment and return its validated outcome.

    Raises the environment's errors, and `EnvironmentFault` for an invalid outcome or a `SystemExit`.
    """
    try:
        environment = await make(call)
        call.clock.call_name = "run"
        call.clock.start()
        return _validate_outcome(await environment.run(task, policy))
    except EpisodeTruncated:
        return Outcome(status="truncated")
    except (SystemExit, KeyboardInterrupt) as error:  # these would end the event loop of all episodes
        raise EnvironmentFault(describe_error(error)) from error


def describe_error(error: BaseException) -> str:
    """Return `raised` and the error's text, to follow the name of the call that raised it."""
    return f"raised {printable(error_text(error, caller=__name__))}"


def _validate_outcome(value: object) -> Outcome:
    """Return the outcome with plain Python numbers. Raises `EnvironmentFault` if it is invalid or has failed."""
    if not isinstance(value, Outcome):
        raise EnvironmentFault(f"returned a {type(value).__name__}, not an Outcome")
    if value.status not in get_args(Status):
        raise EnvironmentFault(f"returned the status {value.status!r:.100}, not one of {', '.join(get_args(Status))}")
    if value.status == "failed":
        raise EnvironmentFault("reported that the episode failed")
    reserved = RESERVED.intersection(value.metrics)
    if reserved:
        raise EnvironmentFault(f"returned a metric named {min(reserved)}, a name that core uses itself")
    try:
        columns = json.loads(json.dumps(dict(value.columns), default=lambda value: value.tolist(), allow_nan=False))
    except (AttributeError, TypeError, ValueError) as error:
        problem = f"returned columns that are not finite numbers: {error_text(error, caller=__name__)}"
        raise EnvironmentFault(problem) from None
    return Outcome(
        reward=_finite_number("the reward", value.reward),
        turn_rewards={
            int(turn): _finite_number(f"the reward of turn {turn}", each) for turn, each in value.turn_rewards.items()
        },
        metrics={str(name): _finite_number(f"the metric {name}", each) for name, each in value.metrics.items()},
        status=value.status,
        bad_tool_calls=int(_finite_number("the number of bad tool calls", value.bad_tool_calls)),
        columns=columns,
    )


def _finite_number(name: str, value: object) -> float:
    """Convert a real number of any library. Raises `EnvironmentFault` if it is not a finite number."""
    if not (isinstance(value, Real) and math.isfinite(value)):
        raise EnvironmentFault(f"returned an invalid number: {name} is {value!r:.100}")
    return float(value)


def _build_played(task: Task, episode: Episode, outcome: Outcome) -> Played:
    """Build the rows of an episode with their rewards, metrics and columns.

    Raises `EpisodeError` if the policy had no turn, and `EnvironmentFault` if the outcome rewards a turn that was not
    played or has invalid columns.
    """
    for turn in outcome.turn_rewards:
        if turn not in range(episode.num_turns):
            raise EnvironmentFault(f"rewarded turn {turn!r:.100} of {episode.num_turns}")
    rows = tuple(row for row in episode.rows if row.own_turns)
    if not rows:
        raise EpisodeError(
            "the episode ended before the policy's first turn",
            where="environment",
            hint="check that the prompt and the first observation leave room for a reply, "
            "or set environment.on_failure: drop to leave out such episodes",
        )
    for number, row in enumerate(rows):
        row.branch = number  # a row whose only call its client canceled has left a gap
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
        own = {ENVIRONMENT: measured if row is rows[0] else {}, TURN_NUMBER: _turn_numbers(row)}
        row.columns = Columns(own, EnvironmentConfig.columns)
        row.columns |= _row_columns(row, outcome.columns, episode.rules.columns) | episode.changed_columns(row)
    prompt = with_seen(task.prompt, [row.conversation for row in rows])
    return Played(prompt, task.sample_id, rows, reward, dict(outcome.turn_rewards))


def _turn_numbers(row: Row) -> list[int]:
    """Return the value of the column `TURN_NUMBER` for each token of the response."""
    numbers = {place: number for number, place in row.own_turns.items()}
    return [numbers.get(place, -1) for place, turn in enumerate(row.turns) for _ in turn.token_ids]


def _check_columns(columns: Mapping[str, Any], episode: Episode) -> None:
    """Raise `EnvironmentFault` for an undeclared column, or a per-token column that is not a dict keyed by turn."""
    turns = set(map(str, range(episode.num_turns)))
    for name, value in columns.items():
        if (kind := episode.rules.columns.get(name)) is None:
            raise EnvironmentFault(f"returned a column {name!r:.100}, which it does not declare in `columns`")
        if kind.per == "token" and not (isinstance(value, dict) and value.keys() <= turns):
            problem = f"returned a column {name!r} that does not map the {len(turns)} turns to values: {value!r:.100}"
            raise EnvironmentFault(problem)


def _row_columns(row: Row, columns: Mapping[str, Any], kinds: Mapping[str, Column]) -> Columns:
    """Return the environment's columns of one row, per-token values spread over the row's tokens.

    Raises `EnvironmentFault` if a turn's list of values does not match its number of tokens.
    """
    kept = {name: kind for name, kind in kinds.items() if name in columns or not kind.optional}
    values = {
        name: columns.get(name, kind.fill if kind.per in ("sample", "prompt") else {}) for name, kind in kept.items()
    }
    for name, kind in kept.items():
        if kind.per == "token":
            values[name], turns = [kind.fill] * len(row.ids), values[name]
            for turn, end in row.turn_ends.items():
                size = len(row.turns[row.own_turns[turn]].token_ids)
                value = turns.get(str(turn), kind.fill)
                if isinstance(value, list) and len(value) != size:
                    problem = f"returned {len(value)} values of column {name!r} for the {size} tokens of turn {turn}"
                    raise EnvironmentFault(problem)
                values[name][end + 1 - size : end + 1] = value if isinstance(value, list) else [value] * size
    return Columns(values, kinds)
