"""PPO.advantages: from scores, KL and values to what the loss is given."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.batching import collate
from rlhf_core.types import BufferItem, Experience
from rlhf_ppo.algorithm import PPO
from rlhf_ppo.config import PPOConfig


def item(index: int, score: float, log_probs: Sequence[float], **changes: Any) -> BufferItem:
    length = len(log_probs)
    values = {
        "action_mask": torch.ones(length, dtype=torch.bool),
        "reference_log_probs": torch.zeros(length),
        "values": torch.zeros(length),
        **{key: torch.tensor(value) if isinstance(value, list) else value for key, value in changes.items()},
    }
    return BufferItem(
        sample_id=index,
        group_id=index,
        policy_version=0,
        prompt_ids=torch.tensor([5, 6]),
        response_ids=torch.arange(4, 4 + length),
        action_log_probs=torch.tensor(log_probs),
        score=score,
        **values,
    )


def episode(*items: BufferItem) -> Experience:
    return collate(items)


def raw(**options: Any) -> PPO:
    return PPO(PPOConfig(**{"whiten_advantages": False, "gamma": 1.0, "lam": 1.0, **options}))


def test_score_stands_on_the_last_action_only() -> None:
    output = raw(kl_coef=0.0, gamma=0.5, lam=1.0).advantages(episode(item(0, 8.0, [0.0, 0.0, 0.0])))
    assert output.advantages is not None
    # 8 at the last token, discounted by 0.5 a token on its way back: on every token it would be 14, 12, 8.
    assert output.advantages.tolist() == [[2.0, 4.0, 8.0]]


def test_gae_by_hand() -> None:
    ppo = raw(kl_coef=0.0, gamma=0.9, lam=0.8)
    output = ppo.advantages(episode(item(0, 1.0, [0.0, 0.0], values=[0.5, 0.25])))
    last = 1.0 - 0.25
    first = 0.0 + 0.9 * 0.25 - 0.5 + 0.9 * 0.8 * last
    torch.testing.assert_close(output.advantages, torch.tensor([[first, last]]))
    torch.testing.assert_close(output.returns, torch.tensor([[first + 0.5, last + 0.25]]))


@pytest.mark.parametrize(
    ("estimator", "first", "second"),
    [("k1", 0.5, -0.5), ("k2", 0.125, 0.125), ("k3", math.exp(-0.5) - 0.5, math.exp(0.5) - 1.5)],
)
def test_kl_in_the_reward_is_of_the_policy_to_the_reference(estimator: str, first: float, second: float) -> None:
    # log p - log q = -1 - (-1.5) = 0.5 and -2 - (-1.5) = -0.5; d = 0 would be the same either way round.
    sample = item(0, 1.0, [-1.0, -2.0], reference_log_probs=[-1.5, -1.5])
    output = raw(kl_coef=0.1, kl_estimator=estimator).advantages(episode(sample))
    expected = [1.0 - 0.1 * (first + second), 1.0 - 0.1 * second]
    torch.testing.assert_close(output.advantages, torch.tensor([expected]))
    assert output.metrics["kl/mean"] == pytest.approx((first + second) / 2, abs=1e-6)
    assert output.metrics["kl/per_sample"] == pytest.approx(first + second, abs=1e-6)


def test_kl_in_the_loss_leaves_the_reward_alone() -> None:
    sample = item(0, 1.0, [-1.0, -2.0], reference_log_probs=[-1.5, -1.5])
    output = raw(kl_coef=0.1, kl_in="loss").advantages(episode(sample))
    assert output.advantages is not None
    assert output.advantages.tolist() == [[1.0, 1.0]]


def test_the_samples_own_coefficient_wins() -> None:
    samples = [item(i, 0.0, [-1.0], reference_log_probs=[-2.0], kl_coef=coef) for i, coef in enumerate((0.5, 0.25))]
    output = raw(kl_coef=0.1).advantages(episode(*samples))
    assert output.advantages is not None
    assert output.advantages.flatten().tolist() == [-0.5, -0.25]


def test_scores_are_not_clipped() -> None:
    output = raw(kl_coef=0.0).advantages(episode(item(0, 123.0, [0.0]), item(1, -77.0, [0.0])))
    assert output.advantages is not None
    assert output.advantages.flatten().tolist() == [123.0, -77.0]


def test_whitening_is_over_the_tokens_of_the_episode_after_gae() -> None:
    ppo = raw(kl_coef=0.0, whiten_advantages=True)
    output = ppo.advantages(episode(item(0, 3.0, [0.0, 0.0]), item(1, 0.0, [0.0])))
    # Advantages 3, 3, 0: mean 2, biased variance 2. Returns stay as they are.
    high, low = 1 / math.sqrt(2), -2 / math.sqrt(2)
    torch.testing.assert_close(output.advantages, torch.tensor([[high, high], [low, 0.0]]))
    torch.testing.assert_close(output.returns, torch.tensor([[3.0, 3.0], [0.0, 0.0]]))


def test_positions_that_are_no_action_are_skipped_over() -> None:
    mask = torch.tensor([True, False, True])
    with_hole = item(0, 2.0, [-1.0, math.nan, -1.0], action_mask=mask, values=[0.5, math.inf, 0.25])
    without = item(0, 2.0, [-1.0, -1.0], values=[0.5, 0.25])
    ppo = raw(kl_coef=0.1, gamma=0.9, lam=0.8)
    holed, whole = (ppo.advantages(episode(each)).advantages for each in (with_hole, without))
    assert holed is not None and whole is not None
    assert holed[0, [0, 2]].tolist() == whole[0].tolist()
    assert holed[0, 1] == 0.0


def test_explained_variance() -> None:
    perfect = item(0, 1.0, [0.0], values=[1.0]), item(1, 0.0, [0.0], values=[0.0])
    assert raw(kl_coef=0.0).advantages(episode(*perfect)).metrics["value/explained_variance"] == 1.0
    same = item(0, 1.0, [0.0]), item(1, 1.0, [0.0])
    assert "value/explained_variance" not in raw(kl_coef=0.0).advantages(episode(*same)).metrics


def test_adaptive_controller_moves_after_the_episode_and_is_saved() -> None:
    options = {"kl_coef": 0.1, "kl_controller": "adaptive", "kl_target": 1.0, "kl_horizon_samples": 10.0}
    ppo = raw(**options)
    output = ppo.advantages(episode(item(0, 0.0, [-1.0], reference_log_probs=[-3.0])))
    assert output.metrics["kl/coef"] == pytest.approx(0.1)
    ppo.end_episode()
    raised = 0.1 * (1 + 0.2 * 1 / 10)  # kl 2 of target 1, the error clipped to 0.2, one sample
    other = raw(**options)
    other.load_state_dict(ppo.state_dict())
    metrics = other.advantages(episode(item(0, 0.0, [-1.0], reference_log_probs=[-3.0]))).metrics
    assert metrics["kl/coef"] == pytest.approx(raised)


def slow_reference(items: Sequence[BufferItem], config: PPOConfig) -> list[list[float]]:
    """Advantages in plain float64 Python, before whitening."""
    rows = []
    for each in items:
        assert each.values is not None and each.reference_log_probs is not None and each.score is not None
        difference = [float(p) - float(q) for p, q in zip(each.action_log_probs, each.reference_log_probs, strict=True)]
        kl = {
            "k1": lambda d: d,
            "k2": lambda d: d * d / 2,
            "k3": lambda d: math.exp(-d) - 1 + d,
        }[config.kl_estimator]
        rewards = [-config.kl_coef * kl(d) for d in difference]
        rewards[-1] += each.score
        values = [float(v) for v in each.values] + [0.0]
        row, carried = [], 0.0
        for t in reversed(range(len(rewards))):
            carried = rewards[t] + config.gamma * values[t + 1] - values[t] + config.gamma * config.lam * carried
            row.append(carried)
        rows.append(row[::-1])
    return rows


@given(
    seed=st.integers(0, 1000),
    estimator=st.sampled_from(["k1", "k2", "k3"]),
    gamma=st.floats(0, 1),
    lam=st.floats(0, 1),
    whiten=st.booleans(),
)
def test_against_a_slow_float64_reference(seed: int, estimator: Any, gamma: float, lam: float, whiten: bool) -> None:
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 6, (5,), generator=random).tolist()
    items = []
    for index, length in enumerate(lengths):
        numbers = torch.randn(3, length, generator=random)
        fields = {"reference_log_probs": numbers[1] - 2, "values": numbers[2]}
        items.append(replace(item(index, float(index) - 2, [0.0] * length), action_log_probs=numbers[0] - 2, **fields))
    config = PPOConfig(kl_estimator=estimator, gamma=gamma, lam=lam, whiten_advantages=whiten)
    result = PPO(config).advantages(episode(*items))
    assert result.advantages is not None and result.returns is not None
    expected = slow_reference(items, config)
    flat = [value for row in expected for value in row]
    mean = math.fsum(flat) / len(flat)
    scale = math.sqrt(math.fsum((x - mean) ** 2 for x in flat) / len(flat) + 1e-8)
    for row, advantages in enumerate(expected):
        for t, value in enumerate(advantages):
            wanted = (value - mean) / scale if whiten else value
            assert float(result.advantages[row, t]) == pytest.approx(wanted, rel=1e-4, abs=1e-4)
            values = items[row].values
            assert values is not None
            assert float(result.returns[row, t]) == pytest.approx(value + float(values[t]), rel=1e-5, abs=1e-5)
        assert not result.advantages[row, len(advantages) :].any()


def test_no_reference_without_a_kl_penalty(make_items: Callable[..., list[BufferItem]]) -> None:
    assert PPO(PPOConfig(kl_coef=0.0)).roles == {"policy", "critic"}
    assert PPO(PPOConfig(kl_coef=0.1)).roles == {"policy", "critic", "reference"}
    without = [replace(each, reference_log_probs=None) for each in make_items(3)]
    assert "kl/mean" not in PPO(PPOConfig(kl_coef=0.0)).advantages(collate(without)).metrics


def test_truncated_importance_weights_multiply_the_advantages() -> None:
    ppo = raw(kl_coef=0.0, importance_cap=2.0)
    assert ppo.needs_trainer_log_probs
    # trainer / engine: 0.5, 1 and 4, which is cut to 2.
    trainer = [math.log(0.5), 0.0, math.log(4.0)]
    output = ppo.advantages(episode(item(0, 3.0, [0.0, 0.0, 0.0], trainer_log_probs=trainer)))
    assert output.advantages is not None and output.returns is not None
    torch.testing.assert_close(output.advantages, torch.tensor([[1.5, 3.0, 6.0]]))
    torch.testing.assert_close(output.returns, torch.tensor([[3.0, 3.0, 3.0]]))
    assert output.metrics["off_policy/truncated_fraction"] == pytest.approx(1 / 3)
    assert output.metrics["off_policy/weight_mean"] == pytest.approx(3.5 / 3)
    assert output.metrics["off_policy/effective_sample_size"] == pytest.approx(3.5**2 / (3 * 5.25))
