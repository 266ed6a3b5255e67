"""State of the makers' rewards over a resume, as a trainer saves and restores it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_core.strategy import Strategy

from .calls import ask


class MakerRewardStates:
    """Rank 0 asks the coordinator, to which each maker sends its rewards' state with its samples."""

    def __init__(self, coordinator: Any, strategy: Strategy) -> None:
        self._coordinator = coordinator
        self._strategy = strategy

    def states(self) -> list[dict[str, Any]]:
        """One entry a maker, on rank 0, the only one that saves."""
        found: list[dict[str, Any]] = []
        self._strategy.run_on_main(lambda: found.extend(ask(self._coordinator, "reward_states")))
        return found

    def load_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Each maker takes its state before its next prompts; with another number of makers some share one."""
        self._strategy.run_on_main(lambda: ask(self._coordinator, "give_reward_states", list(states)))
