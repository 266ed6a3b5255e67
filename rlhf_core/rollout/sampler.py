"""What draws the prompts of a run, where a section of the run file brings it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ..types import RolloutGroup


class Sampler(Protocol):
    """Decides which records are drawn, from the success of those drawn before (`Section.sampler`)."""

    def judge(self, group: RolloutGroup) -> float | None:
        """Return the success of a finished group; None if `learn` should not receive it.

        Called where the answers are made, over Ray on another instance: it must not depend on `learn` or a state.
        """
        ...

    def draw(self, count: int, episode: int) -> list[int]:
        """The records of the next `count` positions, for an episode."""
        ...

    def learn(self, record: int, success: float) -> None:
        """Take in the success of a record's group."""
        ...

    def take_metrics(self) -> dict[str, float]:
        """Metrics since the last call."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
