"""The contract of an advantage estimator: a number for each token, the same for any number of ranks."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest

import rlhf_objective as objective
from rlhf_core.algorithm import RolloutAlgorithm
from rlhf_core.columns import Columns
from rlhf_core.rewards.combiner import RewardCombiner
from rlhf_core.rollout.episode_metrics import EPISODE_COLUMNS
from rlhf_core.rollout.samples import GREEDY_COLUMNS, GREEDY_REWARDS, TURN_REWARDS, made_episode
from rlhf_core.training.batches import BatchPlan
from rlhf_core.training.estimates import EpisodeEstimates
from rlhf_core.types import BufferItem, Experience, PhaseTimes
from rlhf_core.whole import Whole
from rlhf_objective.estimate import estimated

from ..samples import make_item
from ..thread_ranks import Ranks
from .functions import FunctionContract

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf_core.place import Place

    Estimator = Callable[[Any], Tensor]

WEIGHTS = {"score": 1.0, "environment": 0.5}


class AdvantageContract(FunctionContract):
    """Four prompts with four answers and a greedy one each, two rewards, a KL, values, an episode of two branches."""

    kind = "advantages"

    @pytest.fixture
    @classmethod
    def items(cls) -> list[BufferItem]:
        return _items()

    def test_a_number_for_each_token(self, function: Estimator, items: list[BufferItem]) -> None:
        import torch

        episode = _episode(items)
        found = _computed(function, episode)
        assert found.dtype == torch.float32, f"advantages are {found.dtype}, not float32"
        assert bool(torch.isfinite(found).all()), "advantages are not all finite"
        assert not found[~episode.action_mask].any(), "advantages are 0 outside the mask"
        assert found[episode.action_mask].abs().max() > 0, "every advantage is 0"

    def test_it_is_pure(self, function: Estimator, items: list[BufferItem]) -> None:
        import torch

        episode = _episode(items)
        before = copy.deepcopy(episode)
        first, second = _computed(function, episode), _computed(function, episode)
        assert torch.equal(first, second), "computed twice it gives two results: where is the randomness from?"
        for name in ("scores", "values", "action_log_probs", "action_mask"):
            assert torch.equal(getattr(before, name), getattr(episode, name)), f"it changes {name}: return new tensors"

    def test_what_is_masked_does_not_count(self, function: Estimator, items: list[BufferItem]) -> None:
        import torch

        episode = _episode(items)
        names = ("values", "action_log_probs", "reference_log_probs", "trainer_log_probs")
        broken = {name: getattr(episode, name).masked_fill(~episode.action_mask, math.nan) for name in names}
        found = _computed(function, replace(episode, **broken))
        torch.testing.assert_close(found, _computed(function, episode))

    def test_ranks_compute_what_one_computes(self, function: Estimator, items: list[BufferItem]) -> None:
        import torch

        algorithm = cast(RolloutAlgorithm, _Estimating(function))
        ((alone, _),) = estimates_of_ranks(lambda: algorithm, RewardCombiner(WEIGHTS), items, 1)
        expected = {(item.sample_id, item.branch): item.advantages for item in alone if item.action_mask.any()}
        shares = estimates_of_ranks(lambda: algorithm, RewardCombiner(WEIGHTS), items, 3)
        hint = (
            f"is `needs` ({objective.needs_of(function)!r}) enough, and is each sum over rows one through `all_reduce`?"
        )
        seen = set()
        for item in (item for share, _ in shares for item in share if item.action_mask.any()):
            place = (item.sample_id, item.branch)
            one, other = item.advantages, expected[place]
            assert one is not None and other is not None
            assert torch.allclose(one, other, rtol=1e-4, atol=1e-5), f"sample {place}: {one}, alone {other}: {hint}"
            seen.add(place)
        assert seen == set(expected)

    def test_scores_that_are_all_the_same(self, function: Estimator, items: list[BufferItem]) -> None:
        """As at the start and the end of many runs: every answer fails, or none does."""
        import torch

        flat = _episode([replace(item, rewards=dict.fromkeys(WEIGHTS, 1.0)) for item in items])
        assert bool(torch.isfinite(_computed(function, flat)).all())

    def test_one_answer_alone(self, function: Estimator, items: list[BufferItem]) -> None:
        import torch

        assert bool(torch.isfinite(_computed(function, _episode(items[:1]))).all())


def estimates_of_ranks(
    make: Callable[[], RolloutAlgorithm], combiner: RewardCombiner, items: Sequence[BufferItem], num_ranks: int
) -> list[tuple[list[BufferItem], Mapping[str, float]]]:
    """What each of so many ranks computes of an episode: the items that it trains on, and the metrics."""

    def work(rank: int, place: Place) -> tuple[list[BufferItem], Mapping[str, float]]:
        estimates = EpisodeEstimates(make(), combiner, place, BatchPlan(5, 1, rank, num_ranks))
        found = estimates.of(made_episode(items, PhaseTimes()), 0)
        return [item for each in found.epochs for batch in each for item in batch], found.metrics

    return Ranks(num_ranks).run(work)


class _Estimating:
    """An algorithm's advantages and nothing else."""

    def __init__(self, estimator: Estimator) -> None:
        self._estimator = estimator
        self.needs_all_rows = objective.needs_of(estimator) == "episode"

    def masked(self, item: BufferItem) -> BufferItem:
        from rlhf_core.batching import masked

        return masked(item)

    def advantages(self, episode: Experience) -> Experience:
        return replace(episode, advantages=_computed(self._estimator, episode))


def _computed(estimator: Estimator, episode: Experience) -> Tensor:
    assert episode.reference_log_probs is not None
    whole = Whole.of(episode)
    kl = objective.kl_estimate(episode.action_log_probs, episode.reference_log_probs, "k1")
    rewards = objective.token_rewards(whole.here(whole.scores), kl, 0.1, episode.action_mask)
    return estimated(estimator, episode, whole, rewards=rewards, kl=kl, penalises_kl=True)


def _items() -> list[BufferItem]:
    import torch

    generator = torch.Generator().manual_seed(5)
    items = []
    for sample in range(16):
        for branch in range(2 if sample == 6 else 1):
            length = 1 + (sample * 5 + branch) % 7
            item = make_item(sample, group_id=sample // 4, num_actions=length)
            mask = torch.ones(length, dtype=torch.bool)
            mask[1:3] = length < 5  # an observation in the longer ones
            drawn = torch.randn(4, length, generator=generator) / 5
            items.append(
                replace(
                    item,
                    branch=branch,
                    action_mask=mask,
                    action_log_probs=-drawn[0].abs() - 0.1,
                    reference_log_probs=-drawn[1].abs() - 0.1,
                    trainer_log_probs=-drawn[2].abs() - 0.1,
                    values=drawn[3],
                    rewards={"score": float(sample % 3), "environment": float(sample % 5 == 0)},
                    columns=Columns(
                        {
                            TURN_REWARDS: torch.zeros(length, len(WEIGHTS)),
                            GREEDY_REWARDS: {"score": float(sample // 4 % 2), "environment": 0.5},
                        },
                        {**GREEDY_COLUMNS, **EPISODE_COLUMNS},
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
    return replace(batch, part_of=replace(Whole.of(batch), greedy_scores=combiner.combine_as_before(greedy)))
