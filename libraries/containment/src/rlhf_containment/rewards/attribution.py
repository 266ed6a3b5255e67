"""Finds the answers at fault for a failed call of an isolated reward, by scoring each answer alone.

Only for calls that passed their deadline or lost their process: the reward that saw the batch no longer exists, so
no reward, stateful or not, is asked about one answer twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from rlhf_core.rewards.calling import Ask, Outcome
from rlhf_core.rewards.threads import DeadlinePassed
from rlhf_core.rewards.values import RewardFault
from rlhf_core.types import Rollout

Fault = TypeVar("Fault", bound=RewardFault)

MAX_ROUNDS = 4
"""Maximum number of rounds: the answers that hang in a batch take at most this many deadlines."""
MAX_TIMEOUTS = 16
"""Maximum number of calls in a round that pass their deadline: each gets at least this fraction of the round's time."""
MAX_LOST = 256
"""Maximum number of calls in a round that end their process."""


def score_alone(
    ask: Ask,
    prepare: Callable[[], None],
    batch: Sequence[Rollout],
    fault: RewardFault,
    timeout_seconds: float,
) -> list[Outcome]:
    """Outcome of each answer of a batch whose call failed with `fault`.

    There are rounds of `timeout_seconds` each, divided evenly among the answers left. An answer that passed its share
    of the time is tried once more, after those not tried yet. One for which no time is left keeps `fault`. All answers
    keep it if each one fails: then the reward is at fault, not an answer.

    Args:
        ask: scores one answer within a number of seconds.
        prepare: starts a process if none is ready, outside the deadline. Raises `RewardFault` or `OSError` if it
            cannot.
    """
    outcomes: list[Outcome] = [fault] * len(batch)
    tries = [0] * len(batch)
    least = timeout_seconds / MAX_TIMEOUTS
    for _ in range(MAX_ROUNDS):
        waiting = [
            place
            for place, outcome in enumerate(outcomes)
            if outcome is fault or (isinstance(outcome, DeadlinePassed) and tries[place] < 2)
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
                took = max(took, least if isinstance(outcome, DeadlinePassed) else timeout_seconds / MAX_LOST)
            seconds -= took
            outcomes[place] = outcome
            tries[place] += 1
        all_tried = all(outcome is not fault for outcome in outcomes)
        if all_tried and all(isinstance(outcome, RewardFault) for outcome in outcomes):
            return [fault] * len(batch)
    return outcomes


def _explained(alone: Fault, fault: RewardFault, count: int) -> Fault:
    return type(alone)(f"{alone}, scoring this answer alone after a call with {count} answers failed ({fault})")
