"""GDPO, pass@k and ReMax: by hand, and against slow float64 loops."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch

from rlhf_core.episode_view import EpisodeView
from rlhf_objective import KL_PENALTY, AdvantageInput, FunctionUse, needs_greedy_answer, needs_of


def scalars(
    rewards: dict[str, list[float]], groups: list[int], lengths: list[int], weights: dict[str, float], **more: Any
) -> EpisodeView:
    columns = {name: torch.tensor(values) for name, values in rewards.items()}
    total = torch.stack([weights.get(name, 1.0) * column for name, column in columns.items()]).sum(0)
    return EpisodeView(
        sample_ids=more.get("sample_ids", torch.arange(len(groups))),
        group_ids=torch.tensor(groups),
        scores=total,
        lengths=torch.tensor(lengths),
        rewards=columns,
        weights=weights,
        branches=more.get("branches"),
        totals=total,
    )


def estimate(name: str, episode: EpisodeView, **options: Any) -> list[float]:
    found = FunctionUse("advantages", {"name": name, **options}).bind(where="test")(episode)
    assert found.dtype == torch.float32
    values: list[float] = found.tolist()
    return values


def slow_normalised(values: list[float], groups: list[int], divide: bool) -> list[float]:
    found = []
    for value, group in zip(values, groups, strict=True):
        own = [v for v, g in zip(values, groups, strict=True) if g == group]
        spread = statistics.stdev(own) if len(own) > 1 else 0.0
        found.append(0.0 if spread == 0 else (value - statistics.fmean(own)) / (spread + 1e-6 if divide else 1.0))
    return found


@pytest.mark.parametrize("divide", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_gdpo_agrees_with_a_slow_reference(seed: int, divide: bool) -> None:
    draw = torch.Generator().manual_seed(seed)
    groups = [0, 0, 0, 0, 1, 1, 1, 2]
    lengths = torch.randint(1, 6, (8,), generator=draw).tolist()
    rewards = {name: torch.randint(0, 3, (8,), generator=draw).tolist() for name in ("right", "brief", KL_PENALTY)}
    weights = {"right": 1.0, "brief": -0.25}
    sums = [0.0] * 8
    for name, values in rewards.items():
        part = slow_normalised([float(value) for value in values], groups, divide and name != KL_PENALTY)
        sums = [total + weights.get(name, 1.0) * each for total, each in zip(sums, part, strict=True)]
    tokens = [total for total, length in zip(sums, lengths, strict=True) for _ in range(length)]
    mean, std = statistics.fmean(tokens), math.sqrt(statistics.pvariance(tokens) + 1e-8)
    as_floats = {name: [float(value) for value in values] for name, values in rewards.items()}
    found = estimate("gdpo", scalars(as_floats, groups, lengths, weights), divide_by_std=divide)
    assert found == pytest.approx([(total - mean) / std for total in sums], rel=1e-4, abs=1e-4)


def test_gdpo_does_not_magnify_the_rounding_of_a_kl_of_zero() -> None:
    """As in the first episode, where the policy still is the reference."""
    rewards = {"right": [1.0, 0.0, 1.0, 0.0]}
    plain = estimate("gdpo", scalars(rewards, [0] * 4, [2] * 4, {}))
    rounded = {**rewards, KL_PENALTY: [1e-8, -3e-8, 2e-8, 0.0]}
    assert estimate("gdpo", scalars(rounded, [0] * 4, [2] * 4, {})) == pytest.approx(plain, abs=1e-6)


def test_gdpo_keeps_a_reward_that_grpo_drowns() -> None:
    """Right answers that differ in form: their sum hides the form behind a reward a hundred times as large."""
    rewards = {"right": [100.0, 100.0, 0.0, 0.0], "form": [1.0, 0.0, 1.0, 0.0]}
    episode = scalars(rewards, [0] * 4, [2] * 4, {})
    grpo, gdpo = estimate("group-normalised", episode), estimate("gdpo", episode)
    assert grpo[0] - grpo[1] < 0.02 * (grpo[0] - grpo[2])
    # Each reward gives +-1 / (2 sqrt(1/3)) to its two better and two worse: sums of 2 s, 0, 0 and -2 s, whitened.
    assert gdpo == pytest.approx([math.sqrt(2), 0.0, 0.0, -math.sqrt(2)], abs=1e-4)


def test_pass_at_k_by_hand() -> None:
    """Best 5, second best 3; two best of 4; one alone; equal ones."""
    rewards = [5.0, 3.0, 0.0, 4.0, 4.0, 1.0, 9.0, 2.0, 2.0]
    episode = scalars({"it": rewards}, [0, 0, 0, 1, 1, 1, 2, 3, 3], [1] * 9, {})
    assert estimate("pass-at-k", episode, divide_by_std=False) == [2.0, *[0.0] * 8]
    expected = 2.0 / (statistics.stdev([5.0, 3.0, 0.0]) + 1e-6)
    assert estimate("pass-at-k", episode) == pytest.approx([expected, *[0.0] * 8], rel=1e-5)


@pytest.mark.parametrize("divide", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_pass_at_k_agrees_with_a_slow_reference(seed: int, divide: bool) -> None:
    """max over the group less max over the others, for every answer."""
    draw = torch.Generator().manual_seed(seed)
    groups = sorted(torch.randint(0, 4, (12,), generator=draw).tolist())
    rewards = torch.randint(-3, 3, (12,), generator=draw).double().tolist()
    expected = []
    for place, group in enumerate(groups):
        own = [reward for reward, other in zip(rewards, groups, strict=True) if other == group]
        others = [r for i, (r, other) in enumerate(zip(rewards, groups, strict=True)) if other == group and i != place]
        gain = max(own) - max(others) if others else 0.0
        spread = statistics.stdev(own) if len(own) > 1 else 0.0
        expected.append(gain / (spread + 1e-6) if divide and spread > 0 else gain)
    found = estimate("pass-at-k", scalars({"it": rewards}, groups, [2] * 12, {}), divide_by_std=divide)
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_an_episode_of_several_rows_is_one_answer() -> None:
    """Three rows of one best answer: it is the single best, and each of its rows has the advantage."""
    ids = torch.tensor([0, 0, 0, 1, 2])
    more = {"sample_ids": ids, "branches": torch.tensor([0, 1, 2, 0, 0])}
    episode = scalars({"it": [4.0, 4.0, 4.0, 1.0, 2.0]}, [0] * 5, [1] * 5, {}, **more)
    assert estimate("pass-at-k", episode, divide_by_std=False) == [2.0, 2.0, 2.0, 0.0, 0.0]
    by_answer = estimate("gdpo", scalars({"it": [4.0, 1.0, 2.0]}, [0] * 3, [3, 1, 1], {}))
    assert estimate("gdpo", episode) == pytest.approx([by_answer[0]] * 3 + by_answer[1:], rel=1e-5)


def test_remax_by_hand() -> None:
    """Two answers to a prompt whose greedy one scores 1, one to a prompt whose greedy one scores 4."""
    remax = FunctionUse("advantages", "remax").bind(where="test")
    rewards = torch.tensor([[-0.5, 0.25, 3.0], [0.0, 0.0, 0.0], [4.0, 9.0, 9.0]])
    mask = torch.tensor([[True, True, True], [True, True, False], [True, False, False]])
    greedy = torch.tensor([1.0, 1.0, 4.0])
    found = remax(AdvantageInput(rewards, mask, torch.tensor([0, 0, 1]), greedy_scores=greedy))
    assert found.tolist() == [[1.75, 2.25, 2.0], [-1.0, -1.0, 0.0], [0.0, 0.0, 0.0]]
    assert needs_greedy_answer(remax.func if hasattr(remax, "func") else remax) and needs_of(remax) == "row"


@pytest.mark.parametrize("seed", range(5))
def test_remax_agrees_with_a_slow_reference(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    rewards, greedy = torch.randn(6, 5, generator=draw), torch.randn(6, generator=draw)
    mask = torch.rand(6, 5, generator=draw) < 0.7
    expected = [
        [sum(rewards[row, u].item() for u in range(t, 5) if mask[row, u]) - greedy[row].item() for t in range(5)]
        for row in range(6)
    ]
    remax = FunctionUse("advantages", "remax").bind(where="test")
    found = remax(AdvantageInput(rewards, mask, torch.arange(6), greedy_scores=greedy))
    torch.testing.assert_close(found, torch.tensor(expected) * mask, rtol=1e-5, atol=1e-6)
