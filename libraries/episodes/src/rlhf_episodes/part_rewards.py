"""Rewards of a single environment among several, added to the environment's reward."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from typing import Any

from rlhf_core.columns import Columns
from rlhf_core.components import RewardContext
from rlhf_core.config.resolved import Configured
from rlhf_core.config.sections import RewardEntry
from rlhf_core.rewards.scorer import RewardScorer, Scores, make_reward_spec
from rlhf_core.rewards.values import TurnScores
from rlhf_core.rollout.episode_metrics import ENVIRONMENT, OWN
from rlhf_core.rollout.row import Played
from rlhf_core.types import Rollout

from .leases import OF_PROCESS, lease_key

_COSTS = "reward_calls/"


class PartRewards:
    """Scores episodes of one environment.

    The rewards are built at the first use. Players of a process share them, as they share the rewards of the run.
    """

    def __init__(self, rewards: Sequence[Configured], context: RewardContext) -> None:
        """Build nothing yet.

        Args:
            rewards: Rewards with their options, including weight and label.
            context: Device, seed and model path.
        """
        self._entries = [(reward, reward.typed(RewardEntry)) for reward in rewards]
        self._context = context
        self._key = lease_key([reward.to_mapping() for reward in rewards], asdict(context))
        self._scorer: RewardScorer | None = None

    @property
    def scorer(self) -> RewardScorer:
        """The rewards, built at the first use."""
        if self._scorer is None:
            self._scorer = OF_PROCESS.acquire(self._key, self._build)
        return self._scorer

    def _build(self) -> RewardScorer:
        return RewardScorer(
            [
                make_reward_spec(reward, reward.config, self._context, entry, name=entry.label, weight=entry.weight)
                for reward, entry in self._entries
            ]
        )

    def submit(self, rollouts: Sequence[Rollout]) -> Future[Scores]:
        """Score rollouts in the background.

        Args:
            rollouts: The last branch of each episode.
        """
        return self.scorer.submit(rollouts)

    def add(self, played: Played, scores: Mapping[str, float] | None, label: str, weight: float) -> Played:
        """Return an episode with the weighted scores added to its reward, or without rows if it is dropped.

        Args:
            played: The episode with the environment's own reward.
            scores: Name of a reward -> score of the episode's last branch. None drops the episode.
            label: Label of the environment.
            weight: Factor of all rewards of the environment.
        """
        if scores is None:
            return replace(played, rows=())
        numbers = [number for number, _ in played.rows[-1].sampled.values()]
        total = [played.reward or 0.0]
        turns = dict(played.turn_rewards)
        measured = dict(played.rows[0].columns[ENVIRONMENT])
        for name, score in scores.items():
            factor = weight * self.scorer.weights[name]
            total.append(factor * score)
            measured[f"{OWN}{label}/reward/{name}"] = float(score)
            for turn, part in (score.turns if isinstance(score, TurnScores) else {}).items():
                turns[numbers[turn]] = turns.get(numbers[turn], 0.0) + factor * part
        reward = math.fsum(total)
        measured[f"{OWN}{label}/reward"] = reward
        measure(played, measured)
        return replace(played, reward=reward, turn_rewards=turns)

    def take_costs(self, label: str) -> dict[str, float]:
        """Return the costs since the last call, as `reward_calls/<label>/<name>/<count>`. Empty before the first use.

        Args:
            label: Label of the environment.
        """
        costs = {} if self._scorer is None else self._scorer.take_metrics()
        return {f"{_COSTS}{label}/{name.removeprefix(_COSTS)}": value for name, value in costs.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of rewards that have one. Empty before the first use."""
        return {} if self._scorer is None else self._scorer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self.scorer.load_state_dict(state)

    def close(self) -> None:
        """Release the rewards, if they were used. The last player closes them."""
        scorer, self._scorer = self._scorer, None
        if scorer is not None:
            OF_PROCESS.release(self._key)


def measure(played: Played, values: dict[str, float]) -> None:
    """Replace the metrics of an episode, which its first row has.

    Args:
        played: The episode.
        values: All metrics, by the names that core reads (`rlhf_core.rollout.episode_metrics`).
    """
    row = played.rows[0]
    row.columns |= Columns({ENVIRONMENT: values}, row.columns.kinds)
