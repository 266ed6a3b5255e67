"""What holds for the advantages of an algorithm, whether its own or a named estimator's: the base of both contracts."""

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
class Estimating:
    """An algorithm, or what of one computes advantages, and episodes to compute them of."""

    make: Callable[[], RolloutAlgorithm]
    combiner: RewardCombiner
    episode: Experience
    flat: Experience
    """The episode with scores that are all the same."""


class EstimatesContract:
    """Subclasses have a fixture `estimating`."""

    def test_advantages_are_numbers_for_every_action(self, estimating: Estimating) -> None:
        import torch

        made, mask = estimating.make().advantages(estimating.episode), estimating.episode.action_mask
        found = made.advantages
        assert found is not None, "advantages() must set the episode's advantages"
        assert found.shape == mask.shape, f"advantages are {tuple(found.shape)}: [B, A] of the episode"
        assert found.dtype == torch.float32, f"advantages are {found.dtype}, not float32"
        assert bool(torch.isfinite(found).all()), "advantages are not all finite"
        assert not found[~mask].any(), "advantages are 0 outside the mask"
        assert found[mask].abs().max() > 0, "every advantage is 0, though scores differ"
        bad = {name: value for name, value in made.metrics.items() if not math.isfinite(value)}
        assert not bad, f"metrics of the episode are not finite: {bad}"

    def test_advantages_are_pure(self, estimating: Estimating) -> None:
        """Every rank computes them separately and must get the same result."""
        before = copy.deepcopy(estimating.episode)
        first, second = (estimating.make().advantages(estimating.episode) for _ in range(2))
        _equal(before, estimating.episode, "the episode is changed: return a new one")
        _equal(first, second, "computed twice it gives two results: where is the randomness from?")
        assert first.metrics == second.metrics, "metrics of one episode differ when computed twice"

    def test_ranks_compute_what_one_computes(self, estimating: Estimating) -> None:
        """Each of three ranks computes its rows, of all rows if it needs them; together they get the numbers of one."""
        import torch

        from rlhf_core.batching import split

        make, combiner, items = estimating.make, estimating.combiner, split(estimating.episode)
        ((alone, metrics),) = estimates_of_ranks(make, combiner, items, 1)
        expected = {(item.sample_id, item.branch): item.advantages for item in alone if item.action_mask.any()}
        hint = f"is `needs_all_rows` ({make().needs_all_rows}) enough, and is each sum over rows one over ranks?"
        seen = set()
        for share, of_rank in estimates_of_ranks(make, combiner, items, 3):
            for item in (item for item in share if item.action_mask.any()):
                place = (item.sample_id, item.branch)
                one, other = item.advantages, expected[place]
                assert one is not None and other is not None
                assert torch.allclose(one, other, rtol=1e-4, atol=1e-5), (
                    f"sample {place} has advantages {one} on one of three ranks, {other} on one alone: {hint}"
                )
                seen.add(place)
            wrong = {
                name: (of_rank[name], metrics[name])
                for name in make().advantages(estimating.episode).metrics
                if not math.isclose(of_rank[name], metrics[name], rel_tol=1e-4, abs_tol=1e-5)
            }
            assert not wrong, f"metrics on one of three ranks, and on a single one: {wrong}: {hint}"
        assert seen == set(expected)

    def test_scores_that_are_all_the_same(self, estimating: Estimating) -> None:
        """As at the start and the end of many runs: every answer fails, or none does."""
        import torch

        found = estimating.make().advantages(estimating.flat).advantages
        assert found is not None and bool(torch.isfinite(found).all())


def estimates_of_ranks(
    make: Callable[[], RolloutAlgorithm], combiner: RewardCombiner, items: Sequence[BufferItem], num_ranks: int
) -> list[tuple[list[BufferItem], Mapping[str, float]]]:
    """What each of so many ranks computes of an episode: the items that it trains on, and the metrics."""

    def work(rank: int, place: Place) -> tuple[list[BufferItem], Mapping[str, float]]:
        estimates = EpisodeEstimator(make(), combiner, place, BatchPlan(5, 1, rank, num_ranks))
        found = estimates.of(collected_episode(items, PhaseTimes()), 0)
        return [item for each in found.epochs for batch in each for item in batch], found.metrics

    return Ranks(num_ranks).run(work)


def _equal(one: Experience, other: Experience, message: str) -> None:
    import torch

    for field in fields(one):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, torch.Tensor):
            assert isinstance(b, torch.Tensor) and torch.equal(a, b), f"{message} (`{field.name}`)"
