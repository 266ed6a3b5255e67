"""Base of the contracts of algorithms and advantage estimators: requirements on advantages."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from rlhf_core.algorithm import RolloutAlgorithm
from rlhf_core.rewards.combiner import RewardCombiner
from rlhf_core.rollout.samples import collected_episode
from rlhf_core.training.batches import BatchPlan
from rlhf_core.training.estimates import EpisodeEstimator
from rlhf_core.types import BufferItem, Experience, PhaseTimes

from ..thread_ranks import Ranks

if TYPE_CHECKING:
    from rlhf_core.place import Place


@dataclass(frozen=True, slots=True)
class AdvantageCase:
    """An algorithm, or its part that computes advantages, with episodes to compute them for."""

    make: Callable[[], RolloutAlgorithm]
    combiner: RewardCombiner
    episode: Experience
    flat: Experience
    """The episode with equal scores."""


class EstimatesContract:
    """Tests of advantages. Subclasses define the fixture `advantage_case`."""

    def test_advantages_are_numbers_for_every_action(self, advantage_case: AdvantageCase) -> None:
        import torch

        result, mask = advantage_case.make().advantages(advantage_case.episode), advantage_case.episode.action_mask
        advantages = result.advantages
        assert advantages is not None, "advantages() must set the episode's advantages"
        assert advantages.shape == mask.shape, f"advantages must be {tuple(mask.shape)}, got {tuple(advantages.shape)}"
        assert advantages.dtype == torch.float32, f"advantages must be float32, got {advantages.dtype}"
        assert bool(torch.isfinite(advantages).all()), "advantages must be finite"
        assert not advantages[~mask].any(), "advantages must be 0 outside the mask"
        assert advantages[mask].abs().max() > 0, "all advantages are 0, although scores differ"
        bad = {name: value for name, value in result.metrics.items() if not math.isfinite(value)}
        assert not bad, f"metrics of the episode must be finite, got {bad}"

    def test_advantages_are_pure(self, advantage_case: AdvantageCase) -> None:
        """Every rank computes advantages separately and must get the same result."""
        before = copy.deepcopy(advantage_case.episode)
        first, second = (advantage_case.make().advantages(advantage_case.episode) for _ in range(2))
        _equal(before, advantage_case.episode, "advantages() must return a new episode, not modify its argument")
        _equal(first, second, "two computations gave different results: is there unseeded randomness?")
        assert first.metrics == second.metrics, "two computations gave different metrics"

    def test_ranks_compute_what_one_computes(self, advantage_case: AdvantageCase) -> None:
        """Three ranks, each with its rows (or all rows if needed), must get the results of a single rank."""
        import torch

        from rlhf_core.batching import split

        make, combiner, items = advantage_case.make, advantage_case.combiner, split(advantage_case.episode)
        ((alone, metrics),) = estimates_of_ranks(make, combiner, items, 1)
        expected = {(item.sample_id, item.branch): item.advantages for item in alone if item.action_mask.any()}
        hint = f"is `needs_all_rows` ({make().needs_all_rows}) right, and is each sum over rows reduced over ranks?"
        seen = set()
        for share, of_rank in estimates_of_ranks(make, combiner, items, 3):
            for item in (item for item in share if item.action_mask.any()):
                place = (item.sample_id, item.branch)
                one, other = item.advantages, expected[place]
                assert one is not None and other is not None
                assert torch.allclose(one, other, rtol=1e-4, atol=1e-5), (
                    f"sample {place} has advantages {one} on one of three ranks, {other} on a single rank: {hint}"
                )
                seen.add(place)
            wrong = {
                name: (of_rank[name], metrics[name])
                for name in make().advantages(advantage_case.episode).metrics
                if not math.isclose(of_rank[name], metrics[name], rel_tol=1e-4, abs_tol=1e-5)
            }
            assert not wrong, f"metrics (of three ranks, of a single rank) differ: {wrong}: {hint}"
        assert seen == set(expected)

    def test_scores_that_are_all_the_same(self, advantage_case: AdvantageCase) -> None:
        """All answers may fail or succeed, as at the start and the end of many runs."""
        import torch

        advantages = advantage_case.make().advantages(advantage_case.flat).advantages
        assert advantages is not None and bool(torch.isfinite(advantages).all())


def estimates_of_ranks(
    make: Callable[[], RolloutAlgorithm], combiner: RewardCombiner, items: Sequence[BufferItem], num_ranks: int
) -> list[tuple[list[BufferItem], Mapping[str, float]]]:
    """Estimate an episode on `num_ranks` ranks. Return each rank's training items and metrics."""

    def work(rank: int, place: Place) -> tuple[list[BufferItem], Mapping[str, float]]:
        estimates = EpisodeEstimator(make(), combiner, place, BatchPlan(5, 1, rank, num_ranks))
        result = estimates.of(collected_episode(items, PhaseTimes()), 0)
        return [item for each in result.epochs for batch in each for item in batch], result.metrics

    return Ranks(num_ranks).run(work)


def _equal(one: Experience, other: Experience, message: str) -> None:
    import torch

    for field in fields(one):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, torch.Tensor):
            assert isinstance(b, torch.Tensor) and torch.equal(a, b), f"{message} (`{field.name}`)"
