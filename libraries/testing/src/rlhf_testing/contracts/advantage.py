"""Contract of an advantage estimator: a number for each token, the same for any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest

import rlhf_objective as objective
from rlhf_core.algorithm import RolloutAlgorithm
from rlhf_core.columns import Columns
from rlhf_core.episode_view import EpisodeView
from rlhf_core.rewards.combiner import RewardCombiner
from rlhf_core.rollout.episode_metrics import EPISODE_COLUMNS
from rlhf_core.rollout.samples import GREEDY_COLUMNS, GREEDY_REWARDS, TURN_REWARDS
from rlhf_core.types import BufferItem, Experience
from rlhf_objective.estimate import estimated

from ..samples import make_item
from .estimates import AdvantageCase, EstimatesContract
from .functions import FunctionContract

if TYPE_CHECKING:
    from torch import Tensor

    Estimator = Callable[[Any], Tensor]

WEIGHTS = {"score": 1.0, "environment": 0.5}


class AdvantageContract(EstimatesContract, FunctionContract):
    """Tests of an advantage estimator. Subclass it and set `plugin`.

    The episode has four prompts with four answers each and a greedy one, two rewards, a KL, values, rewards of turns,
    and a sample of two branches.

    Example:
        class TestMyEstimator(AdvantageContract):
            plugin = "my-estimator"
    """

    kind = "advantages"

    @pytest.fixture
    @classmethod
    def advantage_case(cls, function: Estimator) -> AdvantageCase:
        items, algorithm = _items(function), cast(RolloutAlgorithm, _EstimatorAlgorithm(function))
        flat = [replace(item, rewards=dict.fromkeys(WEIGHTS, 1.0)) for item in items]
        return AdvantageCase(lambda: algorithm, RewardCombiner(WEIGHTS), _episode(items), _episode(flat))

    def test_what_is_masked_does_not_count(self, function: Estimator, advantage_case: AdvantageCase) -> None:
        import torch

        episode = advantage_case.episode
        names = ("values", "action_log_probs", "reference_log_probs", "trainer_log_probs")
        broken = {name: getattr(episode, name).masked_fill(~episode.action_mask, math.nan) for name in names}
        advantages = _compute(function, replace(episode, **broken))
        torch.testing.assert_close(advantages, _compute(function, episode))

    def test_one_answer_alone(self, function: Estimator) -> None:
        import torch

        assert bool(torch.isfinite(_compute(function, _episode(_items(function)[:1]))).all())


class _EstimatorAlgorithm:
    """An algorithm that only computes advantages."""

    def __init__(self, estimator: Estimator) -> None:
        self._estimator = estimator
        self.needs_all_rows = objective.needs_of(estimator) == "episode"

    def masked(self, item: BufferItem) -> BufferItem:
        from rlhf_core.batching import masked

        return masked(item)

    def advantages(self, episode: Experience) -> Experience:
        return replace(episode, advantages=_compute(self._estimator, episode))


def _compute(estimator: Estimator, episode: Experience) -> Tensor:
    assert episode.reference_log_probs is not None
    view = EpisodeView.of(episode)
    kl = objective.kl_estimate(episode.action_log_probs, episode.reference_log_probs, "k1")
    turns = objective.earned_in_turns(episode, view) if objective.credits_turns(estimator) else None
    rewards = objective.token_rewards(view.local(view.scores), kl, 0.1, episode.action_mask, turns)
    return estimated(estimator, episode, view, rewards=rewards, kl=kl, penalises_kl=True)


def _items(estimator: Estimator) -> list[BufferItem]:
    """Items with the columns that the estimator's passes would add, of positive values."""
    import torch

    added = objective.estimator_columns(estimator)

    generator = torch.Generator().manual_seed(5)
    items = []
    for sample in range(16):
        for branch in range(2 if sample == 6 else 1):
            length = 1 + (sample * 5 + branch) % 7
            item = make_item(sample, group_id=sample // 4, num_actions=length)
            mask = torch.ones(length, dtype=torch.bool)
            mask[1:3] = length < 5  # an observation in the longer answers
            noise = torch.randn(4, length, generator=generator) / 5
            earned = torch.zeros(length, len(WEIGHTS))
            earned[0 if length >= 5 else -1, 0] = sample % 2 / 2  # at the end of the first turn
            items.append(
                replace(
                    item,
                    branch=branch,
                    action_mask=mask,
                    action_log_probs=-noise[0].abs() - 0.1,
                    reference_log_probs=-noise[1].abs() - 0.1,
                    trainer_log_probs=-noise[2].abs() - 0.1,
                    values=noise[3],
                    rewards={"score": float(sample % 3), "environment": float(sample % 5 == 0)},
                    columns=Columns(
                        {
                            TURN_REWARDS: earned,
                            GREEDY_REWARDS: {"score": float(sample // 4 % 2), "environment": 0.5},
                            **{name: noise[0].abs() + 0.1 for name in added},
                        },
                        {**GREEDY_COLUMNS, **EPISODE_COLUMNS, **added},
                    ),
                )
            )
    return items


def _episode(items: list[BufferItem]) -> Experience:
    import torch

    from rlhf_core.batching import collate

    combiner, batch = RewardCombiner(WEIGHTS), collate(items)
    batch = replace(batch, scores=combiner.combine(batch.rewards).scores)
    greedy = {name: torch.tensor([item.columns[GREEDY_REWARDS][name] for item in items]) for name in WEIGHTS}
    return replace(batch, view=replace(EpisodeView.of(batch), greedy_scores=combiner.combine_as_before(greedy)))
