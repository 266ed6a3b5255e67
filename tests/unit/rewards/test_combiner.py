"""Weighting, clipping and running normalisation, against numbers worked out by hand and plain Python."""

import json
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.errors import RewardError
from rlhf_core.rewards.combiner import RewardCombiner, RunningMoments

floats = st.floats(-1e3, 1e3, width=32)


def test_weighted_sum_and_metrics():
    raw = {"a": torch.tensor([1.0, 3.0]), "b": torch.tensor([10.0, 0.0])}
    combined = RewardCombiner({"a": 2.0, "b": -0.1}).combine(raw)
    assert combined.scores.tolist() == [1.0, 6.0]
    assert combined.scores.dtype == torch.float32
    assert combined.metrics == {"reward/mean": 3.5, "reward/std": 2.5, "reward/a": 2.0, "reward/b": 5.0}


def test_clipping_says_what_it_did():
    combined = RewardCombiner({"a": 1.0}, clip=(-1.0, 2.0)).combine({"a": torch.tensor([-3.0, 0.0, 2.0, 7.0])})
    assert combined.scores.tolist() == [-1.0, 0.0, 2.0, 2.0]
    assert combined.metrics == {
        "reward/mean": 1.5,
        "reward/std": pytest.approx(3.640054944640259),
        "reward/a": 1.5,
        "reward/clip_fraction": 0.5,
        "reward/score_mean": 0.75,
        "reward/score_std": pytest.approx(1.299038105676658),
    }


def test_normalisation_by_all_episodes_so_far():
    combiner = RewardCombiner({"a": 1.0}, normalise=True)
    first = combiner.combine({"a": torch.tensor([0.0, 2.0])})
    assert first.scores.tolist() == pytest.approx([-1.0, 1.0])
    # 0 2 4 6: mean 3, variance 5
    second = combiner.combine({"a": torch.tensor([4.0, 6.0])})
    assert second.scores.tolist() == pytest.approx([1 / 5**0.5, 3 / 5**0.5])
    assert second.metrics["reward/normaliser_mean"] == 3.0
    assert second.metrics["reward/normaliser_std"] == pytest.approx(5**0.5)
    assert second.metrics["reward/mean"] == 5.0


def test_answers_beside_an_episode_are_scored_in_its_units():
    combiner = RewardCombiner({"a": 2.0, "b": 1.0}, clip=(-4.0, 5.0), normalise=True)
    combiner.combine({"a": torch.tensor([0.0, 2.0]), "b": torch.zeros(2)})
    before = combiner.state_dict()
    greedy = combiner.combine_as_before({"a": torch.tensor([1.0, 3.0]), "b": torch.tensor([2.0, 0.0])})
    assert greedy.tolist() == pytest.approx([(4 - 2) / 2, (5 - 2) / 2])
    assert combiner.state_dict() == before
    with pytest.raises(RewardError, match="samples have"):
        combiner.combine_as_before({"a": torch.tensor([1.0])})


def test_equal_scores_become_zero_not_nan():
    combined = RewardCombiner({"a": 1.0}, normalise=True).combine({"a": torch.full((3,), 0.1)})
    assert combined.scores.abs().max() < 1e-6


@given(st.lists(st.lists(floats, max_size=6), min_size=1, max_size=5))
def test_moments_are_those_of_all_values(batches):
    moments = RunningMoments()
    for batch in batches:
        moments.update(torch.tensor(batch, dtype=torch.float64))
    values = [value for batch in batches for value in batch]
    assert moments.count == len(values)
    assert moments.mean == pytest.approx(statistics.fmean(values) if values else 0.0, abs=1e-9)
    assert moments.std == pytest.approx(statistics.pstdev(values) if values else 0.0, abs=1e-6)


def test_moments_do_not_lose_small_differences_on_a_large_mean():
    moments = RunningMoments()
    for value in (1e9, 1e9 + 1, 1e9 + 2):
        moments.update(torch.tensor([value], dtype=torch.float64))
    assert moments.std == pytest.approx((2 / 3) ** 0.5)


@given(st.lists(floats, min_size=1, max_size=6), st.lists(floats, min_size=1, max_size=6))
def test_a_resumed_normaliser_goes_on_as_if_nothing_had_been(first, second):
    whole = RewardCombiner({"a": 1.0}, clip=(-10.0, 10.0), normalise=True)
    whole.combine({"a": torch.tensor(first)})
    resumed = RewardCombiner({"a": 1.0}, clip=(-10.0, 10.0), normalise=True)
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    one, other = (combiner.combine({"a": torch.tensor(second)}) for combiner in (whole, resumed))
    assert torch.equal(one.scores, other.scores)
    assert one.metrics == other.metrics


def test_state_without_normalisation_is_empty_and_may_be_loaded():
    combiner = RewardCombiner({"a": 1.0})
    assert combiner.state_dict() == {}
    RewardCombiner({"a": 1.0}, normalise=True).load_state_dict({})


def test_an_episode_without_samples():
    combined = RewardCombiner({"a": 1.0}, clip=(0.0, 1.0), normalise=True).combine({"a": torch.zeros(0)})
    assert (combined.scores.shape, combined.metrics) == ((0,), {})


def test_other_names_than_the_weights_are_an_error():
    with pytest.raises(RewardError, match=r"\['a'\], the run has \['a', 'b'\]"):
        RewardCombiner({"a": 1.0, "b": 1.0}).combine({"a": torch.zeros(2)})
