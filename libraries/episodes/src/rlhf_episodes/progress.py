"""Progress of one attempt at an episode, for environments that can continue from a recorded state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .contract import Messages, Status

RESET = -1
"""`Step.turn` of the reset."""
MAX_STATE_CHARS = 100_000
"""Maximum length of a state as JSON. An environment with a longer one is played again with its recorded turns."""


class EpisodeLost(Exception):
    """An attempt at an episode ended, possibly without a fault of its environment. The episode is played again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The result of `reset` or of a `step`, and the environment's state after it."""

    turn: int
    """Number of the turn that the step followed, or `RESET`."""
    observation: Messages
    reward: float = 0.0
    status: Status | None = None
    """How the episode ended with this step, or None if it continues."""
    state: Any
    """Result of `state()`, JSON values."""


class Progress:
    """Steps that an attempt continues after, and the function that records further ones."""

    def __init__(self, steps: Sequence[Step] = (), record: Callable[[Step], None] | None = None) -> None:
        """Create the progress of an attempt.

        Args:
            steps: Steps of an earlier attempt of the run: that of `RESET`, then one per turn.
            record: Records a step. None if steps are not recorded.
        """
        self.steps = tuple(steps)
        self.record = record

    def took_turn(self, turn: int, token_ids: tuple[int, ...], policy_version: int) -> None:
        """Note a turn of the policy. Raises `EpisodeLost` if it is not the turn that the recorded step followed."""
