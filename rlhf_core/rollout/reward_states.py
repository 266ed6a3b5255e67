"""The rewards' state over a resume, where every rank scores its own share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..rewards.scorer import RewardScorer
from ..strategy import Strategy


class RankedRewardStates:
    """The states of all ranks' rewards. After a resume with another number of ranks, some start from the same one."""

    def __init__(self, scorer: RewardScorer, strategy: Strategy) -> None:
        self._scorer = scorer
        self._strategy = strategy

    def states(self) -> list[dict[str, Any]]:
        states: list[dict[str, Any]] = self._strategy.all_gather_objects(self._scorer.state_dict())
        return states if any(states) else []

    def load_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        self._scorer.load_state_dict(states[self._strategy.rank % len(states)])
