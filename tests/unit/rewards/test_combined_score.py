"""The score of one sample, as dynamic sampling asks for it, is the one the whole episode gets."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.rewards.combiner import RewardCombiner, combined_score

numbers = st.floats(-10, 10, width=32)


@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=5), st.sampled_from([None, (-1.0, 2.0)]))
def test_it_agrees_with_the_combiner(samples: list[tuple[float, float]], clip: tuple[float, float] | None) -> None:
    weights = {"a": 0.5, "b": -2.0}
    raw = {name: torch.tensor([sample[i] for sample in samples]) for i, name in enumerate(weights)}
    together = RewardCombiner(weights, clip=clip).combine(raw).scores.tolist()
    alone = [combined_score(weights, clip, dict(zip(weights, sample, strict=True))) for sample in samples]
    assert alone == pytest.approx(together, rel=1e-6, abs=1e-6)
