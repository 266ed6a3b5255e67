"""Lengths are those of the answers as sampled, whatever an algorithm masks of them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import torch

from rlhf_core.batching import masked
from rlhf_core.place import LocalPlace
from rlhf_core.rewards.combiner import RewardCombiner
from rlhf_core.rollout import collected_episode
from rlhf_core.training.batches import BatchPlan
from rlhf_core.training.estimates import EpisodeEstimator
from rlhf_core.types import Experience, PhaseTimes
from rlhf_testing.samples import make_group


def test_masked_answers_keep_their_length() -> None:
    items = [item for number in (0, 1) for item in make_group(number, 2, num_actions=3 + 2 * number).items]

    def all_masked(episode: Experience) -> Experience:
        nowhere = torch.zeros_like(episode.action_mask)
        return replace(episode, action_mask=nowhere, advantages=nowhere.float())

    algorithm = SimpleNamespace(
        advantages=all_masked, masked=masked, needs_all_rows=True, needs_trainer_log_probs=False
    )
    combiner = RewardCombiner(dict.fromkeys(items[0].rewards, 1.0))
    place = LocalPlace(torch.device("cpu"), torch.float32)
    estimates = EpisodeEstimator(algorithm, combiner, place, BatchPlan(4, 1, 0, 1))  # type: ignore[arg-type]
    found = estimates.of(collected_episode(items, PhaseTimes()), 0)
    assert not any(item.action_mask.any() for item in found.items)
    assert (found.metrics["response/length_mean"], found.metrics["response/length_max"]) == (4.0, 5.0)
