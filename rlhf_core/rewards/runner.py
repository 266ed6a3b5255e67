"""Runs one reward under its call options: batches, concurrency, deadline, retries and failure handling."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from ..distributed.lock_watch import lock_watch
from ..errors import RewardError
from ..types import Rollout
from ..util.error_text import error_text
from ..util.redact import printable
from .calling import Call, Outcome, RewardSpec, Start, open_callers
from .threads import MAX_ABANDONED, AsyncLoop, CallThread, DaemonPool, DeadlinePassed
from .values import BadScore, RewardFault, fits, read_scores

_FIRST_WAIT_SECONDS = 0.1
_LONGEST_WAIT_SECONDS = 10.0
_CLOSE_SECONDS = 5.0
_MAX_NAMED = 8
"""Maximum number of samples named in one warning."""
_MAX_REASONS = 4
"""Maximum number of warnings about one batch, each of another reason."""
_log = logging.getLogger("rlhf.rewards")


class RewardRunner:
    """Scores batches with one reward; thread-safe."""

    def __init__(self, spec: RewardSpec, folder: Path | None) -> None:
        """folder: see `RewardCaller`."""
        self.spec = spec
        self._call_options = spec.call_options
        self._counts: Counter[str] = Counter()
        """Costs since they were last taken: `calls`, `seconds` (in calls, summed over concurrent ones), `failures`
        (failed calls, retried ones included, and invalid scores), `retries`, `zeroed`, `dropped`."""
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._pool = DaemonPool(self._call_options.concurrency, self._where)
        self._left_behind: list[CallThread[Any]] = []
        self._loop = AsyncLoop(f"reward-{spec.name}-loop")
        self.reward = None if self._call_options.isolate else spec.function
        """The reward in this process, options bound; None if it runs in others."""
        if not self._call_options.isolate and spec.function is None and spec.recipe is not None:
            self.reward = spec.recipe()
        self._callers = open_callers(spec, folder)
        self._start: Start = self._submit
        self._call: Call = self._call_here
        for caller in reversed(self._callers):
            self._start = partial(caller.start, score=self._start)
            self._call = partial(caller.call, call=self._call)

    def start(self, rollouts: Sequence[Rollout]) -> Callable[[], list[float | None]]:
        """Begin scoring; the returned callable waits for the scores, None if the sample is to be dropped.

        It raises `RewardError` under `on_failure: fail`.
        """
        waiting = self._start(rollouts)

        def collect() -> list[float | None]:
            found = waiting()
            scores = [self._apply(outcome, rollout) for outcome, rollout in zip(found, rollouts, strict=True)]
            self._warn(found, rollouts)
            return scores

        return collect

    def _submit(self, rollouts: Sequence[Rollout]) -> Callable[[], list[Outcome]]:
        size = self._call_options.batch_size or max(len(rollouts), 1)
        batches = [rollouts[start : start + size] for start in range(0, len(rollouts), size)]
        futures = [self._pool.submit(partial(self._run, batch)) for batch in batches]
        return lambda: [outcome for future in futures for outcome in future.result()]

    def _apply(self, outcome: Outcome, rollout: Rollout) -> float | None:
        """The score, or the configured substitute for a missing one."""
        if isinstance(outcome, float):
            return outcome
        if self._call_options.on_failure == "fail":
            cause = outcome.__cause__ if isinstance(outcome, RewardFault) else None
            raise RewardError(
                f"{self.spec.plugin}: {_reason(outcome)}, at sample {rollout.sample_id}",
                where=self._where,
                hint=self._hint(outcome),
            ) from cause
        if self._call_options.on_failure == "zero":
            self._count(zeroed=1)
            return 0.0
        self._count(dropped=1)
        return None

    def _hint(self, outcome: BadScore | RewardFault) -> str:
        if not isinstance(outcome, DeadlinePassed):
            return "mend the reward, or say on_failure: zero or on_failure: drop in its entry"
        if not self._call_options.isolate:
            return "raise its timeout_seconds or lower its batch_size; isolate: true ends a call that hangs"
        return (
            "on_failure: zero or on_failure: drop in its entry applies to such an answer alone; "
            "if the reward is slow, raise its timeout_seconds or lower its batch_size"
        )

    def _warn(self, found: Sequence[Outcome], rollouts: Sequence[Rollout]) -> None:
        """Name the samples to which `on_failure` was applied, by reason."""
        samples = defaultdict(list)
        for outcome, rollout in zip(found, rollouts, strict=True):
            if not isinstance(outcome, float):
                samples[_reason(outcome)].append(rollout.sample_id)
        done = "counts 0" if self._call_options.on_failure == "zero" else "is dropped"
        for reason, ids in islice(samples.items(), _MAX_REASONS):
            more = f" and {len(ids) - _MAX_NAMED} more" if len(ids) > _MAX_NAMED else ""
            named = ", ".join(map(str, ids[:_MAX_NAMED])) + more
            _log.warning("%s: %s: %s: sample %s %s", self._where, self.spec.plugin, printable(reason), named, done)

    def _count(self, **more: float) -> None:
        with self._lock:
            for name, number in more.items():
                self._counts[name] += number  # type: ignore[assignment]  # seconds are not whole

    @property
    def _where(self) -> str:
        return f'reward "{self.spec.name}"'

    def _run(self, batch: Sequence[Rollout]) -> list[Outcome]:
        """Score one batch with retries; invalid scores count as a failure."""
        outcomes: list[Outcome] = []
        for attempt in range(self._call_options.retries + 1):
            if attempt:
                self._count(retries=1)
                wait = min(_FIRST_WAIT_SECONDS * 2 ** (attempt - 1), _LONGEST_WAIT_SECONDS)
                if self._closing.wait(wait):
                    break
            outcomes = self._attempt(batch, self._call_options.timeout_seconds)
            num_bad = sum(isinstance(outcome, BadScore) for outcome in outcomes)
            failures = num_bad or int(any(isinstance(outcome, RewardFault) for outcome in outcomes))
            self._count(failures=failures)
            if not failures:
                break
        if outcomes and isinstance(fault := outcomes[0], RewardFault):
            found = (caller.single_out(batch, fault, self._attempt_alone) for caller in self._callers)
            return next((each for each in found if each is not None), outcomes)
        return outcomes

    def _attempt_alone(self, rollout: Rollout, timeout_seconds: float) -> Outcome:
        (outcome,) = self._attempt([rollout], timeout_seconds)
        self._count(failures=not isinstance(outcome, float))
        return outcome

    def _attempt(self, batch: Sequence[Rollout], timeout_seconds: float) -> list[Outcome]:
        started = time.perf_counter()
        try:
            scores = zip(self._call(batch, timeout_seconds), batch, strict=True)
            return [fits(score, sum(turn.role == "policy" for turn in each.turns)) for score, each in scores]
        except RewardFault as fault:
            return [fault] * len(batch)
        except BaseException as error:  # third-party code may raise anything, KeyboardInterrupt included
            raised = RewardFault(f"raised {error_text(error)}")
            raised.__cause__ = error
            return [raised] * len(batch)
        finally:
            self._count(calls=1, seconds=time.perf_counter() - started)

    def _held_lock(self) -> str:
        error = RewardError(
            f"{self.spec.plugin}: gave no answer within {self._call_options.timeout_seconds:g} s and holds Python's "
            "lock, so that nothing in its process can go on: the process is ended",
            where=self._where,
            hint="isolate: true in its entry gives it a process of its own, which a deadline can end",
        )
        return printable(f"error: {error}")

    def _call_here(self, batch: Sequence[Rollout], timeout: float) -> Sequence[float | BadScore]:
        function = self.reward
        assert function is not None
        deadline = time.monotonic() + timeout

        def call() -> object:
            answer = function(batch)
            return answer if isinstance(answer, Awaitable) else read_scores(answer, len(batch))

        with lock_watch().deadline(timeout, self._held_lock()):
            answer = self._on_call_thread(call)
            if not isinstance(answer, Awaitable):
                return answer  # type: ignore[return-value]
            awaitable: Awaitable[Any] = answer
            try:
                scores = self._loop.run(lambda: awaitable, max(deadline - time.monotonic(), 0.0))
            except DeadlinePassed:
                raise DeadlinePassed(f"gave no answer within {timeout:g} s") from None
            return read_scores(scores, len(batch))

    def _on_call_thread(self, call: Callable[[], object]) -> object:
        with self._lock:
            self._left_behind = [thread for thread in self._left_behind if thread.alive]
            num_hung = len(self._left_behind) + self._loop.abandoned
        if num_hung >= MAX_ABANDONED:
            raise RewardFault(
                f"{num_hung} calls hang, and no thread can be stopped from outside; isolate: true gives it a process"
            )
        thread = CallThread(call, f"reward-{self.spec.name}-call")
        try:
            return thread.result(self._call_options.timeout_seconds)
        except DeadlinePassed:
            with self._lock:
                self._left_behind.append(thread)
            raise

    def take_counts(self) -> dict[str, float]:
        """Costs since the last call, and the reward's own, where it is an object with `take_counts()`."""
        with self._lock:
            taken, self._counts = self._counts, Counter()
        take = getattr(self.reward, "take_counts", None)
        found = {"calls": 0.0, "seconds": 0.0, **taken, **(take() if callable(take) else {})}
        for caller in self._callers:
            found |= caller.take_counts()
        return {str(name): float(value) for name, value in found.items()}

    def close(self) -> None:
        """Cancel pending calls, close the reward, and end callers, event loop and threads."""
        self._closing.set()
        with ExitStack() as stack:
            stack.callback(self._pool.close)
            stack.callback(self._loop.close)
            stack.callback(self._close_reward)
            for caller in self._callers:
                stack.callback(caller.close)

    def _close_reward(self) -> None:
        """Call the reward's `aclose` (async) or `close`, where it is an object that has one."""
        if callable(aclose := getattr(self.reward, "aclose", None)):
            self._loop.run(aclose, _CLOSE_SECONDS)
        elif callable(close := getattr(self.reward, "close", None)):
            try:
                CallThread(close, f"reward-{self.spec.name}-close").result(_CLOSE_SECONDS)
            except DeadlinePassed as passed:
                raise RewardError(f"{self.spec.plugin}: its close {passed}", where=self._where) from None


def _reason(outcome: BadScore | RewardFault) -> str:
    return f"answered {outcome.reason}" if isinstance(outcome, BadScore) else str(outcome)
