"""The caller `isolate`: a reward in its own processes, so that one that hangs, leaks or crashes is ended and replaced.

Samples are sent pickled; what comes back is JSON, since a reward that is fed hostile answers may write anything.
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
    """The process of a call ended, or was ended because it took too much memory."""


class IsolatedCalls(RewardCaller):
    """Calls a reward in worker processes, one process for each call at a time.

    If a call passes its deadline or its process ends, the answers at fault are found by scoring each one alone.
    """

    def __init__(self, spec: RewardSpec) -> None:
        """Raises `RewardError` if the reward cannot be sent to another process."""
        try:
            self._recipe = pickle.dumps(spec.recipe or partial(_itself, spec.function))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise RewardError(
                f"{spec.plugin} cannot be run in its own process: {error}",
                where=f'reward "{spec.name}"',
                hint="define it at the top of a module, or isolate: false",
            ) from error
        self._name = spec.name
        self._counts: Counter[str] = Counter()
        limit = spec.call_options.memory_limit_bytes
        self._start = partial(RequestProcess, "rlhf_containment.rewards.worker", memory_limit_bytes=limit)
        self._lock = threading.Lock()
        self._alive: set[RequestProcess] = set()
        self._free: list[RequestProcess] = []
        """The last one is taken first, which keeps few alive."""
        self._closed = False

    async def call(self, rollouts: Sequence[Rollout], timeout_seconds: float, call: Call) -> Sequence[Outcome]:
        asking = CallThread(partial(self._score, rollouts, timeout_seconds), f"reward-{self._name}-call")
        outcomes: Sequence[Outcome] = await asyncio.wrap_future(asking.outcome)
        return outcomes

    def _score(self, rollouts: Sequence[Rollout], timeout_seconds: float) -> Sequence[Outcome]:
        try:
            return self._ask(rollouts, timeout_seconds)
        except (DeadlinePassed, LostReward) as fault:
            if len(rollouts) < 2:
                raise
            outcomes = score_alone(self._ask_alone, self._prepare, rollouts, fault, timeout_seconds)
            self._counts["failures"] += not all(each is fault for each in outcomes)  # else core counts it
            return outcomes

    def _ask_alone(self, rollout: Rollout, timeout_seconds: float) -> Outcome:
        self._counts["calls"] += 1
        try:
            (outcome,) = self._ask([rollout], timeout_seconds)
        except RewardFault as fault:
            outcome = fault
        self._counts["failures"] += not isinstance(outcome, float)
        return outcome

    def _ask(self, rollouts: Sequence[Rollout], timeout_seconds: float) -> Sequence[Outcome]:
        try:
            request = pickle.dumps(list(rollouts))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise RewardFault(f"cannot be sent these samples: {error}") from error
        worker = self._take()
        try:
            answer = self._answer(worker.ask, request, timeout_seconds, count=len(rollouts))
        except BaseException:
            self._end(worker)
            raise
        self._keep(worker)
        return answer

    def take_counts(self) -> Mapping[str, float]:
        """Calls about single answers, and how many of them failed."""
        taken, self._counts = self._counts, Counter()
        return taken

    def _prepare(self) -> None:
        self._keep(self._take())

    def _take(self) -> RequestProcess:
        """A process that has built the reward. Raises `RewardFault`, or `OSError` if the system starts no process."""
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
            self._answer(worker.start, self._recipe, count=0)
        except BaseException:
            self._end(worker)
            raise
        return worker

    def _keep(self, worker: RequestProcess) -> None:
        """Keep a process for the next call. One that exceeds its memory limit is ended instead."""
        with self._lock:
            if not (self._closed or worker.excess()):
                self._free.append(worker)
                return
        self._end(worker)

    def _end(self, worker: RequestProcess) -> None:
        self._alive.discard(worker)
        worker.end()

    def _answer(self, ask: Callable[..., bytes], *request: Any, count: int) -> Sequence[Outcome]:
        try:
            return read_answer(ask(*request), count)
        except ProcessTimeout as fault:
            raise DeadlinePassed(str(fault)) from None
        except ProcessLost as fault:
            raise LostReward(str(fault)) from None
        except ProcessFault as fault:
            raise RewardFault(str(fault)) from None

    def close(self) -> None:
        """End every process. One in use is killed; its call sees that its connection closes, and ends it."""
        with self._lock:
            self._closed = True
            alive, free, self._free = list(self._alive), self._free, []
        for worker in alive:
            worker.kill()
        for worker in free:
            self._end(worker)


def _itself(function: Callable[..., Any] | None) -> Callable[..., Any] | None:
    return function
