"""Rewards per token, GAE and group advantages against hand-derived numbers and float64 loops."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_objective import explained_variance, gae, group_normalised, leave_one_out, rewards_to_go, token_rewards

NAN = math.nan


def gae_loop(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    advantages, following = [0.0] * len(rewards), 0.0
    for t in range(len(rewards) - 1, -1, -1):
        next_value = values[t + 1] if t + 1 < len(values) else 0.0
        following = rewards[t] + gamma * next_value - values[t] + gamma * lam * following
        advantages[t] = following
    return advantages


def test_the_score_goes_on_the_last_action_and_kl_on_each() -> None:
    mask = torch.tensor([[True, True, False], [True, False, True], [False, False, False]])
    kl = torch.tensor([[0.1, 0.2, NAN], [0.3, NAN, 0.4], [NAN, NAN, NAN]])
    scores = torch.tensor([1.0, 2.0, 3.0])
    expected = torch.tensor([[-0.05, 0.9, 0.0], [-0.15, 0.0, 1.8], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(token_rewards(scores, kl, 0.5, mask), expected)
    per_sample = token_rewards(scores, kl, torch.tensor([0.5, 0.0, 1.0]), mask)
    torch.testing.assert_close(per_sample[1], torch.tensor([0.0, 0.0, 2.0]))
    torch.testing.assert_close(token_rewards(scores, None, 0.5, mask)[0], torch.tensor([0.0, 1.0, 0.0]))


def test_gae_by_hand() -> None:
    rewards, values = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.25]])
    result = gae(rewards, values, torch.ones(1, 2, dtype=torch.bool), gamma=0.5, lam=0.5)
    # delta_1 = 1 - 0.25 = 0.75; delta_0 = 0.5 * 0.25 - 0.5 = -0.375; A_0 = -0.375 + 0.25 * 0.75
    torch.testing.assert_close(result.advantages, torch.tensor([[-0.1875, 0.75]]))
    torch.testing.assert_close(result.returns, torch.tensor([[0.3125, 1.0]]))


@given(st.data(), st.sampled_from([0.0, 0.9, 1.0]), st.sampled_from([0.0, 0.95, 1.0]))
def test_gae_skips_what_is_masked(data: st.DataObject, gamma: float, lam: float) -> None:
    rows, columns = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 7))
    numbers = st.lists(st.floats(-5, 5, width=32), min_size=rows * columns, max_size=rows * columns)
    flags = data.draw(st.lists(st.booleans(), min_size=rows * columns, max_size=rows * columns))
    mask = torch.tensor(flags).view(rows, columns)
    rewards, values = (torch.where(mask, torch.tensor(data.draw(numbers)).view(rows, columns), NAN) for _ in range(2))
    result = gae(rewards, values, mask, gamma, lam)
    to_go = rewards_to_go(rewards, mask, gamma)
    assert result.advantages.dtype == result.returns.dtype == torch.float32
    for row in range(rows):
        kept = mask[row]
        expected = gae_loop(rewards[row, kept].tolist(), values[row, kept].tolist(), gamma, lam)
        assert result.advantages[row, kept].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)
        returns = [a + v for a, v in zip(expected, values[row, kept].tolist(), strict=True)]
        assert result.returns[row, kept].tolist() == pytest.approx(returns, rel=1e-5, abs=1e-5)
        sums = gae_loop(rewards[row, kept].tolist(), [0.0] * int(kept.sum()), gamma, 1.0)
        assert to_go[row, kept].tolist() == pytest.approx(sums, rel=1e-5, abs=1e-5)
    for output in (result.advantages, result.returns, to_go):
        assert (output[~mask] == 0.0).all()


def test_group_advantages_by_hand() -> None:
    scores = torch.tensor([1.0, 7.0, 3.0, 7.0, 5.0])
    groups = torch.tensor([4, 9, 4, 9, 2])
    half = 1.0 / (math.sqrt(2.0) + 1e-6)
    expected = torch.tensor([-half, 0.0, half, 0.0, 0.0])
    torch.testing.assert_close(group_normalised(scores, groups), expected)
    plain = group_normalised(scores, groups, divide_by_std=False)
    assert plain.tolist() == [-1.0, 0.0, 1.0, 0.0, 0.0]
    assert leave_one_out(scores, groups).tolist() == [-2.0, 0.0, 2.0, 0.0, 0.0]


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(-100, 100, width=32)), min_size=1, max_size=20))
def test_group_advantages_equal_a_loop(samples: list[tuple[int, float]]) -> None:
    groups = torch.tensor([group for group, _ in samples])
    scores = torch.tensor([score for _, score in samples], dtype=torch.float32)
    normalised = group_normalised(scores, groups).tolist()
    alone = leave_one_out(scores, groups).tolist()
    for index, (group, score) in enumerate(samples):
        members = [s for g, s in samples if g == group]
        others = [s for i, (g, s) in enumerate(samples) if g == group and i != index]
        if max(members) == min(members):
            assert normalised[index] == 0.0 and alone[index] == 0.0
            continue
        std = statistics.stdev(members)
        expected = (score - statistics.fmean(members)) / (std + 1e-6)
        assert normalised[index] == pytest.approx(expected, rel=1e-5, abs=1e-5)
        assert alone[index] == pytest.approx(score - statistics.fmean(others), rel=1e-5, abs=1e-4)


def test_scores_that_float32_cannot_tell_from_their_mean_have_no_spread() -> None:
    scores = torch.full((7,), 0.1)
    assert (group_normalised(scores, torch.zeros(7, dtype=torch.int64)) == 0).all()


def test_explained_variance() -> None:
    returns = torch.tensor([[1.0, 2.0, 3.0, NAN]])
    mask = ~returns.isnan()
    assert explained_variance(returns, returns, mask) == 1.0
    assert explained_variance(torch.full((1, 4), 2.0), returns, mask) == 0.0
    assert explained_variance(-returns, returns, mask) == pytest.approx(-3.0)
    assert explained_variance(returns, torch.ones(1, 4), mask) is None
    assert explained_variance(returns, returns, torch.zeros_like(mask)) is None
