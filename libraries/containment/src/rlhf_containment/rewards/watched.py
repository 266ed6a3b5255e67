"""The caller `lock-watch`: ends a run if a reward in its process holds the GIL past its deadline."""

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
            f"{spec.plugin}: gave no answer within {spec.call_options.timeout_seconds:g} s and holds the GIL, which "
            "blocks all threads of its process: the process is killed",
            where=f'reward "{spec.name}"',
            hint="with isolate: true in its entry, it runs in a separate process that is killed at its deadline",
        )
        self._message = printable(f"error: {error}")

    async def call(self, rollouts: Sequence[Rollout], timeout_seconds: float, call: Call) -> Sequence[Outcome]:
        if self._is_isolated:
            return await call(rollouts, timeout_seconds)
        with lock_watch().deadline(timeout_seconds, self._message):
            return await call(rollouts, timeout_seconds)
