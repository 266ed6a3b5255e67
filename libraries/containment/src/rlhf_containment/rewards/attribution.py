"""Finds the answers at fault for a failed call of an isolated reward, by scoring each answer alone.

Only for calls that passed their deadline or lost their process: the reward that saw the batch no longer exists, so
no reward, stateful or not, is asked about one answer twice.
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
"""Maximum number of deadlines that all calls take together."""
MAX_TIMEOUTS = 16
"""Maximum number of calls that pass their share of a deadline: each gets at least this fraction of it."""
MAX_LOST = 256
"""Maximum number of calls that end their process, in a deadline."""


def score_alone(
    ask: Callable[[Rollout, float], Outcome],
    prepare: Callable[[], None],
    batch: Sequence[Rollout],
    fault: RewardFault,
    timeout_seconds: float,
) -> list[Outcome]:
    """Outcome of each answer of a batch whose call failed with `fault`.

    Each answer gets an even share of the deadline; those that passed it share another one at the end. One for which no
    time is left keeps `fault`. All answers keep it if each one fails: then the reward is at fault, not an answer.

    Args:
        ask: scores one answer within a number of seconds.
        prepare: starts a process if none is ready, outside the deadline. Raises `RewardFault` or `OSError` if it
            cannot.
    """
    outcomes: list[Outcome] = [fault] * len(batch)
    left = MAX_DEADLINES * timeout_seconds
    least = timeout_seconds / MAX_TIMEOUTS
    late = list(range(len(batch)))
    for _ in range(2):
        share = max(timeout_seconds / max(len(late), 1), least)
        waiting, late = late, []
        for place in waiting:
            if left <= 0:
                return outcomes
            try:
                prepare()
            except (RewardFault, OSError):  # the run is closing, or the system starts no new process
                return outcomes
            started = time.monotonic()
            outcome = ask(batch[place], share)
            took = time.monotonic() - started
            if isinstance(outcome, RewardFault):
                is_late = isinstance(outcome, DeadlinePassed)
                late += [place] * is_late
                took = max(took, least if is_late else timeout_seconds / MAX_LOST)
                outcome = _explained(outcome, fault, len(batch))
            left -= took
            outcomes[place] = outcome
        if all(isinstance(outcome, RewardFault) for outcome in outcomes):
            return [fault] * len(batch)
    return outcomes


def _explained(alone: Fault, fault: RewardFault, count: int) -> Fault:
    return type(alone)(f"{alone}, scoring this answer alone after a call with {count} answers failed ({fault})")
