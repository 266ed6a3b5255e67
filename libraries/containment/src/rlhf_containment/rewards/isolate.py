"""The caller `isolate`: runs a reward in separate processes, so that one that hangs, leaks or crashes is replaced.

Samples are sent pickled. Answers are JSON, since a reward that processes hostile text may write anything.
"""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from rlhf_core.errors import RewardError
from rlhf_core.rewards.calling import Call, RewardCaller, RewardSpec
from rlhf_core.rewards.threads import CallThread, DeadlinePassed
from rlhf_core.rewards.values import Outcome, RewardFault
from rlhf_core.types import Rollout

from ..processes.asked import ProcessFault, ProcessLost, ProcessTimeout, RequestProcess
from .attribution import score_alone
from .messages import read_answer


class LostReward(RewardFault):
    """The process of a call exited or exceeded its memory limit."""


class IsolatedCalls(RewardCaller):
    """Calls a reward in worker processes, one process per concurrent call.

    If a call passes its deadline or its process exits, each answer is scored alone to find the ones at fault.
    """

    def __init__(self, spec: RewardSpec) -> None:
        """Raises `RewardError` if the reward cannot be sent to another process."""
        try:
            self._recipe = pickle.dumps(spec.recipe or partial(_identity, spec.function))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise RewardError(
                f"{spec.plugin} cannot be run in its own process: {error}",
                where=f'reward "{spec.name}"',
                hint="define it at the top level of a module, or set isolate: false",
            ) from error
        self._name = spec.name
        self._counts: Counter[str] = Counter()
        limit = spec.call_options.memory_limit_bytes
        self._start = partial(RequestProcess, "rlhf_containment.rewards.worker", memory_limit_bytes=limit)
        self._lock = threading.Lock()
        self._alive: set[RequestProcess] = set()
        self._free: list[RequestProcess] = []
        """Idle processes. The last one is taken first, which keeps few alive."""
        self._closed = False

    async def call(self, rollouts: Sequence[Rollout], timeout_seconds: float, call: Call) -> Sequence[Outcome]:
        thread = CallThread(partial(self._score, rollouts, timeout_seconds), f"reward-{self._name}-call")
        outcomes: Sequence[Outcome] = await asyncio.wrap_future(thread.outcome)
        return outcomes

    def _score(self, rollouts: Sequence[Rollout], timeout_seconds: float) -> Sequence[Outcome]:
        try:
            return self._score_batch(rollouts, timeout_seconds)
        except (DeadlinePassed, LostReward) as fault:
            if len(rollouts) < 2:
                raise
            outcomes = score_alone(self._score_one, self._prepare, rollouts, fault, timeout_seconds)
            self._counts["failures"] += not all(each is fault for each in outcomes)  # else core counts it
            return outcomes

    def _score_one(self, rollout: Rollout, timeout_seconds: float) -> Outcome:
        self._counts["calls"] += 1
        try:
            (outcome,) = self._score_batch([rollout], timeout_seconds)
        except RewardFault as fault:
            outcome = fault
        self._counts["failures"] += not isinstance(outcome, float)
        return outcome

    def _score_batch(self, rollouts: Sequence[Rollout], timeout_seconds: float) -> Sequence[Outcome]:
        try:
            request = pickle.dumps(list(rollouts))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise RewardFault(f"cannot receive these samples: {error}") from error
        worker = self._take()
        try:
            outcomes = self._call_worker(worker.ask, request, timeout_seconds, count=len(rollouts))
        except BaseException:
            self._end(worker)
            raise
        self._keep(worker)
        return outcomes

    def take_counts(self) -> Mapping[str, float]:
        """Return and reset the numbers of single-answer calls and of failed ones."""
        taken, self._counts = self._counts, Counter()
        return taken

    def _prepare(self) -> None:
        self._keep(self._take())

    def _take(self) -> RequestProcess:
        """Return an idle or new process that has built the reward.

        Raises `RewardFault` if closed or if the reward cannot be built, `OSError` if the system cannot start a process.
        """
        with self._lock:
            if self._closed:
                raise RewardFault("is closed: the run is ending")
            while self._free:
                if (worker := self._free.pop()).exit_code() is None:
                    return worker
                self._end(worker)
            worker = self._start()
            self._alive.add(worker)
        try:
            self._call_worker(worker.start, self._recipe, count=0)
        except BaseException:
            self._end(worker)
            raise
        return worker

    def _keep(self, worker: RequestProcess) -> None:
        """Keep a process for the next call, or end it if it exceeds its memory limit."""
        with self._lock:
            if not (self._closed or worker.excess()):
                self._free.append(worker)
                return
        self._end(worker)

    def _end(self, worker: RequestProcess) -> None:
        self._alive.discard(worker)
        worker.end()

    def _call_worker(self, ask: Callable[..., bytes], *request: Any, count: int) -> Sequence[Outcome]:
        try:
            return read_answer(ask(*request), count)
        except ProcessTimeout as fault:
            raise DeadlinePassed(str(fault)) from None
        except ProcessLost as fault:
            raise LostReward(str(fault)) from None
        except ProcessFault as fault:
            raise RewardFault(str(fault)) from None

    def close(self) -> None:
        """End every process. One in use is killed here, and its call ends it when the connection closes."""
        with self._lock:
            self._closed = True
            alive, free, self._free = list(self._alive), self._free, []
        for worker in alive:
            worker.kill()
        for worker in free:
            self._end(worker)


def _identity(function: Callable[..., Any] | None) -> Callable[..., Any] | None:
    return function
