"""Runs one reward with its call options: batches, concurrency, deadline, retries and failure handling."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import ExitStack
from functools import partial
from itertools import islice

from ..errors import RewardError
from ..types import Rollout
from ..util.redact import printable
from .calling import Call, RewardSpec, open_callers
from .threads import CallThread, DeadlinePassed, LoopThread, awaited, fault_of
from .values import BadScore, Outcome, RewardFault, fits, read_scores

MAX_ABANDONED = 32
"""Maximum number of hung threads of one reward, after which all its calls fail."""
_FIRST_WAIT_SECONDS = 0.1
_LONGEST_WAIT_SECONDS = 10.0
_CLOSE_SECONDS = 5.0
_MAX_NAMED = 8
"""Maximum number of samples named in one warning."""
_MAX_REASONS = 4
"""Maximum number of warnings about one batch, each with a different reason."""
_log = logging.getLogger("rlhf.rewards")


class RewardRunner:
    """Scores batches with one reward. Its coroutines run on the event loop of `RewardScorer`."""

    def __init__(self, spec: RewardSpec) -> None:
        self.spec = spec
        self._call_options = spec.call_options
        self._counts: Counter[str] = Counter()
        """Costs since they were last taken: `calls`, `seconds` (in calls, summed over concurrent ones), `failures`
        (failed calls, including retried ones, and invalid scores), `retries`, `zeroed`, `dropped`."""
        self._lock = threading.Lock()
        self._free_calls = asyncio.Semaphore(self._call_options.concurrency)
        self._hung_threads: set[threading.Thread] = set()
        """Threads of calls that exceeded their deadline."""
        self._loop: LoopThread | None = None
        """Event loop for coroutines of the reward."""
        self.reward = None if self._call_options.isolate else spec.function
        """The reward in this process, with bound options. None if it runs in other processes."""
        self._callers = open_callers(spec)
        self._call: Call = self._call_here
        for caller in reversed(self._callers):
            self._call = partial(caller.call, call=self._call)

    async def score(self, rollouts: Sequence[Rollout]) -> list[float | None]:
        """Return a score per rollout, None for dropped samples. Raises `RewardError` if `on_failure` is `fail`."""
        size = self._call_options.batch_size or max(len(rollouts), 1)
        batches = [rollouts[start : start + size] for start in range(0, len(rollouts), size)]
        outcomes = [each for batch in await asyncio.gather(*map(self._run, batches)) for each in batch]
        scores = [self._apply(outcome, rollout) for outcome, rollout in zip(outcomes, rollouts, strict=True)]
        self._warn(outcomes, rollouts)
        return scores

    def _apply(self, outcome: Outcome, rollout: Rollout) -> float | None:
        """Return the score, or its substitute under `on_failure`."""
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
            return "fix the reward, or set on_failure: zero or on_failure: drop in its entry"
        if not self._call_options.isolate:
            return "raise its timeout_seconds or lower its batch_size. isolate: true ends a call that hangs"
        return (
            "on_failure: zero or on_failure: drop in its entry applies only to such answers. "
            "If the reward is slow, raise its timeout_seconds or lower its batch_size"
        )

    def _warn(self, outcomes: Sequence[Outcome], rollouts: Sequence[Rollout]) -> None:
        """Log the samples to which `on_failure` was applied, by reason."""
        samples = defaultdict(list)
        for outcome, rollout in zip(outcomes, rollouts, strict=True):
            if not isinstance(outcome, float):
                samples[_reason(outcome)].append(rollout.sample_id)
        effect = "counts 0" if self._call_options.on_failure == "zero" else "is dropped"
        for reason, ids in islice(samples.items(), _MAX_REASONS):
            more = f" and {len(ids) - _MAX_NAMED} more" if len(ids) > _MAX_NAMED else ""
            named = ", ".join(map(str, ids[:_MAX_NAMED])) + more
            _log.warning("%s: %s: %s: sample %s %s", self._where, self.spec.plugin, printable(reason), named, effect)

    def _count(self, **more: float) -> None:
        with self._lock:
            for name, number in more.items():
                self._counts[name] += number  # type: ignore[assignment]  # seconds are fractional

    @property
    def _where(self) -> str:
        return f'reward "{self.spec.name}"'

    async def _run(self, batch: Sequence[Rollout]) -> list[Outcome]:
        """Score one batch with retries. Invalid scores count as failures."""
        outcomes: list[Outcome] = []
        async with self._free_calls:
            for attempt in range(self._call_options.retries + 1):
                if attempt:
                    self._count(retries=1)
                    await asyncio.sleep(min(_FIRST_WAIT_SECONDS * 2 ** (attempt - 1), _LONGEST_WAIT_SECONDS))
                outcomes = await self._attempt(batch)
                # If only some outcomes are faults, a caller has retried each of them separately.
                is_failed = all(isinstance(outcome, RewardFault) for outcome in outcomes)
                failures = sum(isinstance(outcome, BadScore) for outcome in outcomes) or int(is_failed)
                self._count(failures=failures)
                if not failures:
                    break
        return outcomes

    async def _attempt(self, batch: Sequence[Rollout]) -> list[Outcome]:
        started = time.perf_counter()
        try:
            outcomes = await self._call(batch, self._call_options.timeout_seconds)
            return [fits(outcome, each) for outcome, each in zip(outcomes, batch, strict=True)]
        except (asyncio.CancelledError, RewardError):  # scoring stops, or a caller cannot continue
            raise
        except BaseException as error:  # from the reward or a caller. SystemExit would end the loop.
            return [fault_of(error)] * len(batch)
        finally:
            self._count(calls=1, seconds=time.perf_counter() - started)

    async def _call_here(self, batch: Sequence[Rollout], timeout_seconds: float) -> Sequence[Outcome]:
        function = self.reward
        assert function is not None
        self._hung_threads = {thread for thread in self._hung_threads if thread.is_alive()}
        if (num_hung := len(self._hung_threads)) >= MAX_ABANDONED:
            raise RewardFault(
                f"{num_hung} calls hang, and threads cannot be stopped. isolate: true runs the reward in a process"
            )

        def call() -> object:
            answer = function(batch)
            return answer if isinstance(answer, Awaitable) else read_scores(answer, len(batch))

        thread = CallThread(call, f"reward-{self.spec.name}-call")
        try:
            async with asyncio.timeout(timeout_seconds):
                answer = await asyncio.wrap_future(thread.outcome)
                if not isinstance(answer, Awaitable):
                    return answer  # type: ignore[no-any-return]
                result = await asyncio.wrap_future(self._loop_thread().submit(awaited(answer)))
                return read_scores(result, len(batch))
        except TimeoutError:
            await self._abandon(thread)
            raise DeadlinePassed(f"gave no answer within {timeout_seconds:g} s") from None

    def _loop_thread(self) -> LoopThread:
        self._loop = self._loop or LoopThread(f"reward-{self.spec.name}-loop")
        return self._loop

    async def _abandon(self, thread: CallThread) -> None:
        """Record the thread that hangs: that of the call, or that of the loop if its coroutine blocks it."""
        loop = self._loop
        if not thread.outcome.done():
            self._hung_threads.add(thread)
        elif loop is not None and await loop.is_blocked():
            self._hung_threads.add(loop.thread)
            self._loop = None if self._loop is loop else self._loop

    def take_counts(self) -> dict[str, float]:
        """Return costs since the last call, including the reward's own if it is an object with `take_counts()`."""
        with self._lock:
            taken, self._counts = self._counts, Counter()
        taken.update(calls=0, seconds=0)
        take = getattr(self.reward, "take_counts", None)
        for more in (take() if callable(take) else {}, *(caller.take_counts() for caller in self._callers)):
            taken.update(more)
        return {str(name): float(value) for name, value in taken.items()}

    def close(self) -> None:
        """Close the callers, the reward, the event loop and threads."""
        with ExitStack() as stack:
            stack.callback(self._close_loop)
            stack.callback(self._close_reward)
            for caller in self._callers:
                stack.callback(caller.close)

    def _close_reward(self) -> None:
        """Call the reward's `aclose` (async) or `close`, if it is an object that has one."""
        if callable(aclose := getattr(self.reward, "aclose", None)):
            closing = self._loop_thread().submit(awaited(aclose()))
        elif callable(close := getattr(self.reward, "close", None)):
            closing = CallThread(close, f"reward-{self.spec.name}-close").outcome
        else:
            return
        try:
            closing.result(_CLOSE_SECONDS)
        except FutureTimeoutError:
            message = f"{self.spec.plugin}: its close gave no answer within {_CLOSE_SECONDS:g} s"
            raise RewardError(message, where=self._where) from None

    def _close_loop(self) -> None:
        if self._loop is not None:
            self._loop.close()


def _reason(outcome: BadScore | RewardFault) -> str:
    return f"returned an invalid score: {outcome.reason}" if isinstance(outcome, BadScore) else str(outcome)
