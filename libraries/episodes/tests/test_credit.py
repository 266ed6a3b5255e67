"""Numbers by hand: where rewards of turns and of episodes go, and what branched episodes weigh in their group."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.rewards.combiner import RewardCombiner
from rlhf_core.training.batches import BatchPlan, rows_of_samples
from rlhf_objective import AdvantageInput, gae, group_normalised, group_spread, leave_one_out, token_rewards
from rlhf_testing.samples import make_item

# Two turns of two tokens with one observation token between.
MASK = torch.tensor([[True, True, False, True, True]])
VALUES = torch.tensor([[0.1, 0.2, 9.0, 0.3, 0.4]])
TURNS = torch.tensor([[0.0, 1.0, 0.0, 0.0, 2.0]])

CASES = {
    # name: (score, turn rewards, rewards per token, advantages with gamma = lam = 0.5)
    # without rewards the deltas are 0, -0.05, -0.1, -0.4
    "a turn's": (3.0, TURNS, [0.0, 1.0, 0.0, 0.0, 2.0], [0.25625, 1.025, 0.0, 0.3, 1.6]),
    "an outcome's": (4.0, 0 * TURNS, [0.0, 0.0, 0.0, 0.0, 4.0], [0.0375, 0.15, 0.0, 0.8, 3.6]),
    "both": (7.0, TURNS, [0.0, 1.0, 0.0, 0.0, 6.0], [0.31875, 1.275, 0.0, 1.3, 5.6]),
    "none of an environment": (4.0, None, [0.0, 0.0, 0.0, 0.0, 4.0], [0.0375, 0.15, 0.0, 0.8, 3.6]),
}


@pytest.mark.parametrize("case", CASES)
def test_rewards_stand_at_their_turn_and_the_rest_at_the_end(case):
    score, turns, per_token, advantages = CASES[case]
    rewards = token_rewards(torch.tensor([score]), None, 0.0, MASK, turns)
    assert rewards.tolist() == [per_token]
    # delta = r + 0.5 V' - V; A = delta + 0.25 A', over the sampled tokens alone
    found = gae(rewards, VALUES, MASK, 0.5, 0.5)
    assert found.advantages[0].tolist() == pytest.approx(advantages, abs=1e-6)
    returns = [a + v if m else 0.0 for a, v, m in zip(advantages, VALUES[0].tolist(), MASK[0].tolist(), strict=True)]
    assert found.returns[0].tolist() == pytest.approx(returns, abs=1e-6)


def test_kl_is_added_on_sampled_tokens_alone():
    kl = torch.tensor([[0.1, 0.2, 5.0, 0.3, 0.4]])
    rewards = token_rewards(torch.tensor([7.0]), kl, 0.5, MASK, TURNS)
    assert rewards[0].tolist() == pytest.approx([-0.05, 0.9, 0.0, -0.15, 5.8])


# Sample 5 has three rows, sample 6 one, both of group 0; sample 7 has two rows, sample 8 one, of group 1.
SAMPLES = torch.tensor([5, 5, 5, 6, 7, 7, 8])
GROUPS = torch.tensor([0, 0, 0, 0, 1, 1, 1])
SCORES = torch.tensor([3.0, 3.0, 3.0, 1.0, 2.0, 2.0, 2.0])


def test_a_branched_episode_enters_its_group_once():
    std = math.sqrt(2.0)  # of 3 and 1, unbiased
    expected = [1 / (std + 1e-6)] * 3 + [-1 / (std + 1e-6)] + [0.0] * 3
    found = group_normalised(SCORES, GROUPS, sample_ids=SAMPLES)
    assert found.tolist() == pytest.approx(expected, abs=1e-6)
    assert leave_one_out(SCORES, GROUPS, SAMPLES).tolist() == pytest.approx([2.0, 2.0, 2.0, -2.0, 0, 0, 0], abs=1e-6)
    spread = group_spread(SCORES, GROUPS, SAMPLES)
    assert (spread.std_mean, spread.without_spread_fraction) == pytest.approx((std / 2, 0.5))


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4), st.floats(-3, 3, width=32)), min_size=1, max_size=9))
def test_rows_change_nothing_for_their_group(samples):
    rows = [(index, group, score) for index, (group, count, score) in enumerate(samples) for _ in range(count)]
    ids, groups, scores = (torch.tensor(column) for column in zip(*rows, strict=True))
    single_groups = torch.tensor([group for group, _, _ in samples])
    single_scores = torch.tensor([score for _, _, score in samples], dtype=torch.float32)
    for estimate in (group_normalised, leave_one_out):
        once = estimate(single_scores, single_groups)
        found = estimate(scores.float(), groups, sample_ids=ids)
        torch.testing.assert_close(found, once[ids], rtol=1e-4, atol=1e-4)


def test_totals_hold_the_score_once_and_the_kl_of_all_rows():
    mask = torch.tensor([[True, True], [False, True], [True, False]])
    kl = torch.tensor([[0.1, 0.2], [9.0, 0.4], [0.8, 9.0]])
    scores = torch.tensor([3.0, 3.0, 1.0])
    rewards = token_rewards(scores, kl, 1.0, mask)
    ids = torch.tensor([5, 5, 6])
    groups = torch.tensor([0, 0, 0])
    found = AdvantageInput(rewards, mask, groups, scores, ids).totals
    assert found.tolist() == pytest.approx([3 - 0.7, 3 - 0.7, 1 - 0.8])
    assert AdvantageInput(rewards, mask, groups).totals.tolist() == pytest.approx([3 - 0.3, 3 - 0.4, 1 - 0.8])


def test_normalising_and_means_count_each_sample_once():
    first = torch.tensor([True, False, False, True, True, False, True])
    rows = RewardCombiner({"environment": 2.0}, normalise=True).combine({"environment": SCORES}, counts=first)
    single = RewardCombiner({"environment": 2.0}, normalise=True).combine({"environment": SCORES[first]})
    assert rows.scores[first].tolist() == single.scores.tolist()
    assert rows.metrics == single.metrics
    assert rows.metrics["reward/mean"] == 4.0


def branched(counts):
    return [replace(make_item(sample), branch=branch) for sample, count in enumerate(counts) for branch in range(count)]


@given(
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=20),
    batch=st.integers(1, 7),
    world=st.integers(1, 5),
)
def test_all_rows_of_a_sample_stand_in_one_update_on_one_rank(counts, batch, world):
    items = branched(counts)
    samples = rows_of_samples(items)
    assert [len(rows) for rows in samples] == counts
    places: dict[int, set[tuple[int, int]]] = {}
    seen = []
    for rank in range(world):
        (updates,) = BatchPlan(batch, 1, rank, world).rows(samples)
        for number, update in enumerate(updates):
            for row in update:
                item = items[row]
                places.setdefault(item.sample_id, set()).add((number, rank))
                seen.append((item.sample_id, item.branch))
    assert all(len(found) == 1 for found in places.values())
    assert sorted(seen) == [(item.sample_id, item.branch) for item in branched(counts)]
