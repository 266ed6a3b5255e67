"""Lengths are those of the answers as sampled, whatever an algorithm masks of them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from rlhf_core.rollout import made_episode
from rlhf_core.training.batches import BatchPlan
from rlhf_core.training.estimates import Estimated
from rlhf_core.training.sources import RolloutSource
from rlhf_core.types import MadeEpisode, PhaseTimes
from rlhf_testing.samples import make_group


def test_masked_answers_keep_their_length() -> None:
    items = [item for number in (0, 1) for item in make_group(number, 2, num_actions=3 + 2 * number).items]

    def masked(made: MadeEpisode, plan: BatchPlan, texts: Any) -> Estimated:
        """Only the first row is this rank's, and all of it is masked."""
        first = replace(items[0], action_mask=items[0].action_mask & False)
        return Estimated(
            rows=made.rows, scores=[0.0] * 4, items=[first], rollouts=[], filler=first, metrics={}, plan=plan
        )

    source = RolloutSource(
        lambda index: made_episode(items, PhaseTimes()),
        SimpleNamespace(of=masked),  # type: ignore[arg-type]
        BatchPlan(4, 1, 0, 2),
        version=lambda: 0,
        on_episode=lambda index, made, estimated: None,
    )
    metrics = source.episode(0).metrics
    assert (metrics["response/length_mean"], metrics["response/length_max"]) == (4.0, 5.0)
