"""Finds the answers at fault for a failed call of an isolated reward, by scoring each answer alone.

Only for calls that passed their deadline or lost their process: the reward that saw the batch no longer exists, so
no reward, stateful or not, is asked about one answer twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from ..types import Rollout
from .threads import DeadlinePassed
from .values import BadScore, RewardFault

Outcome = float | BadScore | RewardFault
Fault = TypeVar("Fault", bound=RewardFault)

MAX_FAILURES = 16
"""Maximum number of failed calls in one of the two rounds: each uses at least this fraction of the round's time."""


def score_alone(
    ask: Callable[[Rollout, float], Outcome],
    prepare: Callable[[], None],
    batch: Sequence[Rollout],
    fault: RewardFault,
    timeout_seconds: float,
) -> list[Outcome]:
    """Outcome of each answer of a batch whose call failed with `fault`.

    There are two rounds of `timeout_seconds` each, divided evenly among the answers left; the second is for answers
    that passed their share of the first. An answer for which no time is left keeps `fault`. So do all answers if the
    first round scores none: then the reward is at fault, not an answer.

    Args:
        ask: scores one answer within a number of seconds.
        prepare: starts a process if none is ready, outside the deadline. Raises `RewardFault` or `OSError` if it
            cannot.
    """
    outcomes: list[Outcome] = [fault] * len(batch)
    least = timeout_seconds / MAX_FAILURES
    for _ in range(2):
        waiting = [
            place for place, outcome in enumerate(outcomes) if isinstance(outcome, DeadlinePassed) or outcome is fault
        ]
        waiting.sort(key=lambda place: outcomes[place] is not fault)  # those not tried yet go first
        seconds = timeout_seconds
        for num_tried, place in enumerate(waiting):
            if seconds <= 0:
                break
            try:
                prepare()
            except (RewardFault, OSError):  # the run is closing, or the system starts no new process
                return outcomes
            started = time.monotonic()
            outcome = ask(batch[place], max(seconds / (len(waiting) - num_tried), least))
            took = time.monotonic() - started
            if isinstance(outcome, RewardFault):
                outcome = _explained(outcome, fault, len(batch))
                took = max(took, least)
            seconds -= took
            outcomes[place] = outcome
        if all(isinstance(outcome, RewardFault) for outcome in outcomes):
            return [fault] * len(batch)
    return outcomes


def _explained(alone: Fault, fault: RewardFault, count: int) -> Fault:
    return type(alone)(f"{alone}, scoring this answer alone after a call with {count} answers failed ({fault})")
