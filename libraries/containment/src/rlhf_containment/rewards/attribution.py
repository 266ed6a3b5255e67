"""Finds the answers that made a call of an isolated reward fail, by scoring each answer alone.

Used only for calls that passed their deadline or lost their process. The reward instance that saw the batch no longer
exists then, so no instance, stateful or not, scores an answer twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from rlhf_core.rewards.threads import DeadlinePassed
from rlhf_core.rewards.values import Outcome, RewardFault
from rlhf_core.types import Rollout

Fault = TypeVar("Fault", bound=RewardFault)

MAX_DEADLINES = 4
"""Maximum total time of all calls, in deadlines of one call."""
MAX_TIMEOUTS = 16
"""Maximum number of late calls per deadline: each call gets at least a deadline divided by this number."""
MAX_LOST = 256
"""Maximum number of calls per deadline that lose their process."""


def score_alone(
    score: Callable[[Rollout, float], Outcome],
    prepare: Callable[[], None],
    batch: Sequence[Rollout],
    fault: RewardFault,
    timeout_seconds: float,
) -> list[Outcome]:
    """Score each answer of a failed batch alone, within an even share of the deadline.

    Late answers are tried once more at the end and share another deadline. An answer keeps `fault` if no time is left
    for it. If every answer fails alone, all keep `fault`, since the reward is at fault rather than an answer.

    Args:
        score: scores one answer within a number of seconds.
        prepare: starts a process if none is ready, outside the deadline. Raises `RewardFault` or `OSError` if it
            cannot.
        batch: the answers of the failed call.
        fault: the failure of that call.
        timeout_seconds: deadline of one call.

    Returns:
        One outcome per answer, in the order of the batch.
    """
    outcomes: list[Outcome] = [fault] * len(batch)
    left = MAX_DEADLINES * timeout_seconds
    least = timeout_seconds / MAX_TIMEOUTS
    late = list(range(len(batch)))
    for _ in range(2):
        share = max(timeout_seconds / max(len(late), 1), least)
        waiting, late = late, []
        for index in waiting:
            if left <= 0:
                return outcomes
            try:
                prepare()
            except (RewardFault, OSError):  # the run is closing, or the system cannot start a process
                return outcomes
            started = time.monotonic()
            outcome = score(batch[index], share)
            took = time.monotonic() - started
            if isinstance(outcome, RewardFault):
                is_late = isinstance(outcome, DeadlinePassed)
                late += [index] * is_late
                took = max(took, least if is_late else timeout_seconds / MAX_LOST)
                outcome = _add_batch_failure(outcome, fault, len(batch))
            left -= took
            outcomes[index] = outcome
        if all(isinstance(outcome, RewardFault) for outcome in outcomes):
            return [fault] * len(batch)
    return outcomes


def _add_batch_failure(alone: Fault, fault: RewardFault, count: int) -> Fault:
    return type(alone)(f"{alone}, scoring this answer alone after a call with {count} answers failed ({fault})")
