"""The caller `lock-watch`: ends a run in whose own process a reward holds Python's lock past its deadline."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_core.errors import RewardError
from rlhf_core.rewards.calling import Call, RewardCaller, RewardSpec
from rlhf_core.rewards.values import Outcome
from rlhf_core.types import Rollout
from rlhf_core.util import printable

from ..lock_watch import lock_watch


class WatchedCalls(RewardCaller):
    """Reports each call in this process to the watchdog."""

    def __init__(self, spec: RewardSpec) -> None:
        self._is_isolated = bool(spec.call_options.isolate)
        error = RewardError(
            f"{spec.plugin}: gave no answer within {spec.call_options.timeout_seconds:g} s and holds Python's lock, so "
            "that nothing in its process can go on: the process is ended",
            where=f'reward "{spec.name}"',
            hint="isolate: true in its entry gives it a process of its own, which a deadline can end",
        )
        self._message = printable(f"error: {error}")

    async def call(self, rollouts: Sequence[Rollout], timeout_seconds: float, call: Call) -> Sequence[Outcome]:
        if self._is_isolated:
            return await call(rollouts, timeout_seconds)
        with lock_watch().deadline(timeout_seconds, self._message):
            return await call(rollouts, timeout_seconds)
