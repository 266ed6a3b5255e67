"""Runs one reward under its call options: batches, concurrency, deadline, retries and failure handling."""

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
"""Most hung threads of one reward before it fails for good."""
_FIRST_WAIT_SECONDS = 0.1
_LONGEST_WAIT_SECONDS = 10.0
_CLOSE_SECONDS = 5.0
_MAX_NAMED = 8
"""Maximum number of samples named in one warning."""
_MAX_REASONS = 4
"""Maximum number of warnings about one batch, each of another reason."""
_log = logging.getLogger("rlhf.rewards")


class RewardRunner:
    """Scores batches with one reward. Its coroutines run on the event loop of `RewardScorer`."""

    def __init__(self, spec: RewardSpec) -> None:
        self.spec = spec
        self._call_options = spec.call_options
        self._counts: Counter[str] = Counter()
        """Costs since they were last taken: `calls`, `seconds` (in calls, summed over concurrent ones), `failures`
        (failed calls, retried ones included, and invalid scores), `retries`, `zeroed`, `dropped`."""
        self._lock = threading.Lock()
        self._free_calls = asyncio.Semaphore(self._call_options.concurrency)
        self._left_behind: set[threading.Thread] = set()
        """Those of calls that passed their deadline."""
        self._loop: LoopThread | None = None
        """On which coroutines of the reward run."""
        self.reward = None if self._call_options.isolate else spec.function
        """The reward in this process, options bound; None if it runs in others."""
        self._callers = open_callers(spec)
        self._call: Call = self._call_here
        for caller in reversed(self._callers):
            self._call = partial(caller.call, call=self._call)

    async def score(self, rollouts: Sequence[Rollout]) -> list[float | None]:
        """The scores, None if the sample is to be dropped. Raises `RewardError` under `on_failure: fail`."""
        size = self._call_options.batch_size or max(len(rollouts), 1)
        batches = [rollouts[start : start + size] for start in range(0, len(rollouts), size)]
        found = [outcome for outcomes in await asyncio.gather(*map(self._run, batches)) for outcome in outcomes]
        scores = [self._apply(outcome, rollout) for outcome, rollout in zip(found, rollouts, strict=True)]
        self._warn(found, rollouts)
        return scores

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

    async def _run(self, batch: Sequence[Rollout]) -> list[Outcome]:
        """Score one batch with retries; invalid scores count as a failure."""
        outcomes: list[Outcome] = []
        async with self._free_calls:
            for attempt in range(self._call_options.retries + 1):
                if attempt:
                    self._count(retries=1)
                    await asyncio.sleep(min(_FIRST_WAIT_SECONDS * 2 ** (attempt - 1), _LONGEST_WAIT_SECONDS))
                outcomes = await self._attempt(batch)
                # Where only some answers have a fault, a caller has tried each of them.
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
        except (asyncio.CancelledError, RewardError):  # we stop; or a caller cannot go on
            raise
        except BaseException as error:  # of the reward, or of a caller: SystemExit would end the loop
            return [fault_of(error)] * len(batch)
        finally:
            self._count(calls=1, seconds=time.perf_counter() - started)

    async def _call_here(self, batch: Sequence[Rollout], timeout_seconds: float) -> Sequence[Outcome]:
        function = self.reward
        assert function is not None
        self._left_behind = {thread for thread in self._left_behind if thread.is_alive()}
        if (num_hung := len(self._left_behind)) >= MAX_ABANDONED:
            raise RewardFault(
                f"{num_hung} calls hang, and no thread can be stopped from outside; isolate: true gives it a process"
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
                found = await asyncio.wrap_future(self._loop_thread().submit(awaited(answer)))
                return read_scores(found, len(batch))
        except TimeoutError:
            await self._leave_behind(thread)
            raise DeadlinePassed(f"gave no answer within {timeout_seconds:g} s") from None

    def _loop_thread(self) -> LoopThread:
        self._loop = self._loop or LoopThread(f"reward-{self.spec.name}-loop")
        return self._loop

    async def _leave_behind(self, thread: CallThread) -> None:
        """Note what hangs: the thread of a call, or the loop that its coroutine blocks."""
        loop = self._loop
        if not thread.outcome.done():
            self._left_behind.add(thread)
        elif loop is not None and await loop.is_blocked():
            self._left_behind.add(loop.thread)
            self._loop = None if self._loop is loop else self._loop

    def take_counts(self) -> dict[str, float]:
        """Costs since the last call, and the reward's own, where it is an object with `take_counts()`."""
        with self._lock:
            taken, self._counts = self._counts, Counter()
        taken.update(calls=0, seconds=0)
        take = getattr(self.reward, "take_counts", None)
        for more in (take() if callable(take) else {}, *(caller.take_counts() for caller in self._callers)):
            taken.update(more)
        return {str(name): float(value) for name, value in taken.items()}

    def close(self) -> None:
        """Close the reward, and end callers, event loop and threads."""
        with ExitStack() as stack:
            stack.callback(self._close_loop)
            stack.callback(self._close_reward)
            for caller in self._callers:
                stack.callback(caller.close)

    def _close_reward(self) -> None:
        """Call the reward's `aclose` (async) or `close`, where it is an object that has one."""
        if callable(aclose := getattr(self.reward, "aclose", None)):
            closing = self._loop_thread().submit(awaited(aclose()))
        elif callable(close := getattr(self.reward, "close", None)):
            closing = CallThread(close, f"reward-{self.spec.name}-close").outcome
        else:
            return
        try:
            closing.result(_CLOSE_SECONDS)
        except FutureTimeoutError:
            told = f"{self.spec.plugin}: its close gave no answer within {_CLOSE_SECONDS:g} s"
            raise RewardError(told, where=self._where) from None

    def _close_loop(self) -> None:
        if self._loop is not None:
            self._loop.close()


def _reason(outcome: BadScore | RewardFault) -> str:
    return f"answered {outcome.reason}" if isinstance(outcome, BadScore) else str(outcome)
