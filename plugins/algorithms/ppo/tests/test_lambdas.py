"""Lambdas of the policy and of the critic, against sums of TD errors in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from rlhf_core.batching import collate
from rlhf_core.types import BufferItem
from rlhf_ppo.algorithm import PPO
from rlhf_ppo.config import PPOConfig

GAMMA = 0.97


def items_of(seed: int) -> list[BufferItem]:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 40, (6,), generator=draw).tolist()
    return [
        BufferItem(
            sample_id=index,
            group_id=index,
            policy_version=0,
            prompt_ids=torch.tensor([5]),
            response_ids=torch.full((length,), 6),
            action_mask=torch.ones(length, dtype=torch.bool),
            action_log_probs=torch.zeros(length),
            values=torch.randn(length, generator=draw),
            score=float(index) - 2,
        )
        for index, length in enumerate(lengths)
    ]


def by_definition(values: Sequence[float], score: float, lam: float) -> list[float]:
    """A_t = sum over k of (gamma lambda)^k delta_{t + k}, without the recursion (Schulman 2016, equation 16)."""
    length = len(values)
    rewards = [*[0.0] * (length - 1), score]
    after = [*values[1:], 0.0]
    deltas = [rewards[t] + GAMMA * after[t] - values[t] for t in range(length)]
    return [sum((GAMMA * lam) ** k * deltas[t + k] for k in range(length - t)) for t in range(length)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("options", "alpha", "critic_lam"),
    [
        ({"lam": 0.9, "critic_lam": 1.0}, None, 1.0),
        ({"lam": 0.9, "critic_lam": 0.5}, None, 0.5),
        ({"lam_alpha": 0.05, "critic_lam": 1.0}, 0.05, 1.0),
        ({"lam_alpha": 0.3, "critic_lam": 0.95}, 0.3, 0.95),
        ({"lam_alpha": 0.3}, 0.3, None),
    ],
)
def test_advantages_and_returns_have_their_own_lambdas(
    options: dict[str, Any], alpha: float | None, critic_lam: float | None, seed: int
) -> None:
    items = items_of(seed)
    config = PPOConfig(**options, gamma=GAMMA, kl_coef=0.0, whiten_advantages=False)
    found = PPO(config).advantages(collate(items))
    assert found.advantages is not None and found.returns is not None
    for row, item in enumerate(items):
        assert item.values is not None and item.score is not None
        values, length = item.values.double().tolist(), len(item.response_ids)
        lam = 0.9 if alpha is None else max(0.0, 1 - 1 / (alpha * length))
        advantages = by_definition(values, item.score, lam)
        targets = by_definition(values, item.score, lam if critic_lam is None else critic_lam)
        assert found.advantages[row, :length].tolist() == pytest.approx(advantages, rel=1e-4, abs=1e-5)
        returns = [target + value for target, value in zip(targets, values, strict=True)]
        assert found.returns[row, :length].tolist() == pytest.approx(returns, rel=1e-4, abs=1e-5)
