"""Advantages of each algorithm and option against numbers derived by hand and float64 loops."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

SCORES, GROUPS, LENGTHS = [1.0, 0.0, 0.0, 3.0, 1.0, 2.0], [4, 4, 4, 9, 9, 9], [2, 3, 1, 2, 1, 3]


def on_tokens(values: Sequence[float], lengths: Sequence[int]) -> torch.Tensor:
    rows = [
        [value if t < length else 0.0 for t in range(max(lengths))]
        for value, length in zip(values, lengths, strict=True)
    ]
    return torch.tensor(rows)


def whitened(rows: list[list[float]], lengths: Sequence[int]) -> torch.Tensor:
    """Over all tokens, biased variance, in float64."""
    tokens = [value for row, length in zip(rows, lengths, strict=True) for value in row[:length]]
    mean, std = statistics.fmean(tokens), math.sqrt(statistics.pvariance(tokens) + 1e-8)
    padded = [
        [(v - mean) / std for v in row[:n]] + [0.0] * (max(lengths) - n) for row, n in zip(rows, lengths, strict=True)
    ]
    return torch.tensor(padded)


def group_of(index: int) -> list[float]:
    return [score for score, group in zip(SCORES, GROUPS, strict=True) if group == GROUPS[index]]


def advantages(made: Any, episode: Any) -> torch.Tensor:
    found = made.advantages(episode).advantages
    assert found is not None and found.dtype == torch.float32
    return found


@pytest.mark.parametrize("divide", [True, False])
@pytest.mark.parametrize("leave_one_out", [True, False])
def test_grpo(algorithm: Callable[..., Any], episode: Callable[..., Any], divide: bool, leave_one_out: bool) -> None:
    options = {"kl_coef": 0, "divide_by_std": divide, "leave_one_out": leave_one_out}
    expected = []
    for index, score in enumerate(SCORES):
        group = group_of(index)
        baseline = (sum(group) - score) / (len(group) - 1) if leave_one_out else statistics.fmean(group)
        expected.append((score - baseline) / (statistics.stdev(group) + 1e-6 if divide else 1.0))
    found = advantages(algorithm("grpo", options), episode(SCORES, GROUPS, LENGTHS))
    torch.testing.assert_close(found, on_tokens(expected, LENGTHS), rtol=1e-6, atol=1e-6)


def test_grpo_by_hand(algorithm: Callable[..., Any], episode: Callable[..., Any]) -> None:
    """Scores 1 and 0: mean 1/2, unbiased deviation 1/sqrt 2, so +-1/sqrt 2; equal scores give 0."""
    found = advantages(algorithm("grpo", {"kl_coef": 0}), episode([1, 0, 2, 2], [0, 0, 1, 1], [1, 2, 1, 2]))
    half = 0.5 / (math.sqrt(0.5) + 1e-6)
    torch.testing.assert_close(found, torch.tensor([[half, 0.0], [-half, -half], [0.0, 0.0], [0.0, 0.0]]))


def test_rloo(algorithm: Callable[..., Any], episode: Callable[..., Any]) -> None:
    """1 - (0 + 0) / 2, 0 - (1 + 0) / 2, …; 3 - (1 + 2) / 2, 1 - (3 + 2) / 2, 2 - (3 + 1) / 2."""
    found = advantages(algorithm("rloo", {"kl_coef": 0}), episode(SCORES, GROUPS, LENGTHS))
    torch.testing.assert_close(found, on_tokens([1.0, -0.5, -0.5, 1.5, -1.5, 0.0], LENGTHS))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_rloo_penalises_the_kl_in_the_reward(
    algorithm: Callable[..., Any], episode: Callable[..., Any], estimator: str
) -> None:
    torch.manual_seed(0)
    ours, reference = torch.randn(6, 3).double(), torch.randn(6, 3).double()
    formula = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(-d) - 1 + d}[estimator]
    kl = [sum(formula(float(ours[i, t] - reference[i, t])) for t in range(n)) for i, n in enumerate(LENGTHS)]
    totals = [score - 0.3 * each for score, each in zip(SCORES, kl, strict=True)]
    expected = []
    for index, total in enumerate(totals):
        others = [t for j, t in enumerate(totals) if GROUPS[j] == GROUPS[index] and j != index]
        expected.append(total - statistics.fmean(others))
    made = algorithm("rloo", {"kl_coef": 0.3, "kl_estimator": estimator})
    given = episode(SCORES, GROUPS, LENGTHS, action_log_probs=ours.float(), reference_log_probs=reference.float())
    output = made.advantages(given)
    torch.testing.assert_close(output.advantages, on_tokens(expected, LENGTHS), rtol=1e-5, atol=1e-5)
    assert output.metrics["kl/per_sample"] == pytest.approx(statistics.fmean(kl), rel=1e-5)
    assert output.metrics["kl/mean"] == pytest.approx(sum(kl) / sum(LENGTHS), rel=1e-5)


@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_reinforce_plus_plus(algorithm: Callable[..., Any], episode: Callable[..., Any], gamma: float) -> None:
    """Rewards-to-go of -kl_coef k1 on each token and the score on the last, whitened over the episode."""
    torch.manual_seed(1)
    ours, reference = torch.randn(6, 3), torch.randn(6, 3)
    rows = []
    for i, n in enumerate(LENGTHS):
        rewards = [-0.1 * float(ours[i, t] - reference[i, t]) + (SCORES[i] if t == n - 1 else 0) for t in range(n)]
        rows.append([sum(gamma ** (k - t) * rewards[k] for k in range(t, n)) for t in range(n)])
    made = algorithm("reinforce++", {"kl_coef": 0.1, "gamma": gamma}, samples_per_prompt=1)
    given = episode(SCORES, list(range(6)), LENGTHS, action_log_probs=ours, reference_log_probs=reference)
    torch.testing.assert_close(advantages(made, given), whitened(rows, LENGTHS), rtol=1e-5, atol=1e-5)


def test_reinforce_plus_plus_with_the_group_as_baseline(
    algorithm: Callable[..., Any], episode: Callable[..., Any]
) -> None:
    rows = [[score - statistics.fmean(group_of(i))] * LENGTHS[i] for i, score in enumerate(SCORES)]
    made = algorithm("reinforce++", {"kl_coef": 0, "baseline": "group"})
    found = advantages(made, episode(SCORES, GROUPS, LENGTHS))
    torch.testing.assert_close(found, whitened(rows, LENGTHS), rtol=1e-5, atol=1e-5)


def test_kl_in_the_loss_leaves_the_reward_alone(algorithm: Callable[..., Any], episode: Callable[..., Any]) -> None:
    reference = torch.full((6, 3), -0.5)
    plain = advantages(algorithm("grpo", {"kl_coef": 0}), episode(SCORES, GROUPS, LENGTHS))
    output = algorithm("grpo").advantages(episode(SCORES, GROUPS, LENGTHS, reference_log_probs=reference))
    torch.testing.assert_close(output.advantages, plain)
    assert output.metrics["kl/mean"] == pytest.approx(math.exp(-0.5) - 1 + 0.5)


def test_long_answers_lose_score(algorithm: Callable[..., Any], episode: Callable[..., Any]) -> None:
    """At most 8 tokens, a buffer of 4: lengths 3, 4, 6, 8 lose 0, 0, 1/2 and 1, times the factor 2."""
    made = algorithm("rloo", {"kl_coef": 0, "overlong_buffer_tokens": 4, "overlong_penalty": 2.0})
    output = made.advantages(episode([1.0, 1.0, 1.0, 1.0], [0, 0, 1, 1], [3, 6, 4, 8]))
    expected = on_tokens([1.0, -1.0, 2.0, -2.0], [3, 6, 4, 8])
    torch.testing.assert_close(output.advantages, expected)
    assert output.metrics["reward/overlong_penalty"] == pytest.approx(-0.75)


def test_truncated_answers_teach_nothing_but_count_in_the_baseline(
    algorithm: Callable[..., Any], episode: Callable[..., Any]
) -> None:
    made = algorithm("rloo", {"kl_coef": 0, "mask_truncated": True})
    given = episode([1.0, 0.0], [0, 0], [3, 8])
    output = made.advantages(given)
    assert output.action_mask.sum(-1).tolist() == [3, 0]
    assert output.advantages[0, 0] == 1.0
    assert made.counts(output) == {"policy": 3.0}


def test_spread_of_the_groups(algorithm: Callable[..., Any], episode: Callable[..., Any]) -> None:
    output = algorithm("grpo", {"kl_coef": 0}).advantages(episode([1, 0, 2, 2], [0, 0, 1, 1], [1, 1, 1, 1]))
    assert output.metrics["group/std_mean"] == pytest.approx(math.sqrt(0.5) / 2)
    assert output.metrics["group/without_spread_fraction"] == 0.5
