"""Clip-Cov and KL-Cov: which tokens are chosen over an episode, and what is done with them."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlhf_forward import uniforms
from rlhf_forward.masking import mask_from_lengths
from rlhf_group.covariance import covariances, largest, some_between
from rlhf_objective import EpisodeTokens, FunctionUse, PolicyLossInput, ppo_policy_loss

LENGTHS = [3, 1, 4, 0, 2]


def tokens(seed: int = 0, draws: torch.Tensor | None = None, lengths: list[int] = LENGTHS) -> EpisodeTokens:
    generator = torch.Generator().manual_seed(seed)
    mask = mask_from_lengths(torch.tensor(lengths), max(lengths))
    log_probs = torch.where(mask, -3 * torch.rand(mask.shape, generator=generator), 0.0)
    advantages = torch.where(mask, 2 * torch.randn(mask.shape, generator=generator), 0.0)
    drawn = uniforms(1, torch.arange(len(lengths))[:, None], torch.arange(max(lengths))) if draws is None else draws
    return EpisodeTokens(log_probs, advantages, mask, drawn, lambda values: values[mask].double())


def slow_covariances(given: EpisodeTokens) -> list[float]:
    pairs = list(zip(given.advantages[given.mask].tolist(), given.log_probs[given.mask].tolist(), strict=True))
    means = [statistics.fmean(column) for column in zip(*pairs, strict=True)]
    return [(advantage - means[0]) * (log_prob - means[1]) for advantage, log_prob in pairs]


@pytest.mark.parametrize("seed", range(3))
def test_covariances_agree_with_a_slow_reference(seed: int) -> None:
    given = tokens(seed)
    here, every = covariances(given)
    expected = slow_covariances(given)
    assert every.tolist() == pytest.approx(expected) and here[given.mask].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("fraction", [0.01, 0.25, 0.5])
def test_the_largest_are_so_large_a_share_of_all(fraction: float) -> None:
    given = tokens(3)
    values = slow_covariances(given)
    number = max(int(fraction * len(values)), 1)
    expected = [value >= sorted(values, reverse=True)[number - 1] for value in values]
    chosen = largest(given, fraction=fraction)
    assert chosen[given.mask].tolist() == expected and sum(expected) == number
    assert not chosen[~given.mask].any()


def test_some_between_bounds_are_drawn() -> None:
    """1,000 tokens, a tenth of all wanted: as many as that of those between the bounds, and none outside."""
    given = tokens(1, lengths=[50] * 20)
    values = torch.tensor(slow_covariances(given))
    between = (values > 0.2) & (values < 2.0)
    chosen = some_between(given, fraction=0.1, low=0.2, high=2.0)[given.mask]
    assert not chosen[~between].any()
    assert int(chosen.sum()) == pytest.approx(100, abs=30)
    assert int(between.sum()) > 200, "they are drawn, not taken"


def test_all_between_bounds_are_taken_where_they_are_few() -> None:
    given = tokens(1)
    values = torch.tensor(slow_covariances(given))
    low = float(values.sort().values[-4:-2].mean())
    between = values > low
    assert int(between.sum()) == 3
    assert torch.equal(some_between(given, fraction=0.9, low=low, high=100.0)[given.mask], between)


def test_an_episode_without_tokens_has_none() -> None:
    given = tokens(1, lengths=[0, 0])
    given = replace(given, **{name: torch.zeros(2, 1) for name in ("log_probs", "advantages", "draws")})
    given = replace(given, mask=torch.zeros(2, 1, dtype=torch.bool), all_tokens=lambda _: torch.zeros(0).double())
    assert not largest(given, fraction=0.5).any()
    assert not some_between(given, fraction=0.5, low=0.0, high=1.0).any()


def batch(marked: list[bool] | None) -> PolicyLossInput:
    """Ratios e^0.1, e^-0.3, e^0.5 and advantages 1, -2, 1."""
    new, old = torch.tensor([[-1.0, -1.0, -1.0]], requires_grad=True), torch.tensor([[-1.1, -0.7, -1.5]])
    chosen = None if marked is None else torch.tensor([marked])
    return PolicyLossInput(new, old, torch.tensor([[1.0, -2.0, 1.0]]), torch.ones(1, 3, dtype=torch.bool), chosen)


def loss(name: str, given: PolicyLossInput, **options: Any) -> Any:
    return FunctionUse("policy_losses", {"name": name, **options}).bind(where="test")(given)


def test_clip_cov_by_hand() -> None:
    found = loss("clip-cov", batch([True, False, False]), clip_eps=0.2)
    assert found.losses[0].tolist() == pytest.approx([0.0, 2 * 0.8, -1.2])
    assert found.clipped[0].tolist() == [True, True, True]
    plain = loss("clip-cov", batch(None), clip_eps=0.2)
    given = batch(None)
    expected = ppo_policy_loss(
        given.log_probs, given.old_log_probs, given.advantages, given.mask, clip_eps_low=0.2, clip_eps_high=0.2
    )
    assert torch.equal(plain.losses, expected.losses)


def test_kl_cov_by_hand() -> None:
    given = batch([False, True, False])
    found = loss("kl-cov", given, coef=0.5)
    expected = [-math.exp(0.1), 2 * math.exp(-0.3) + 0.5 * 0.3, -math.exp(0.5)]
    assert found.losses[0].tolist() == pytest.approx(expected)
    (gradient,) = torch.autograd.grad(found.losses.sum(), given.log_probs)
    assert gradient[0].tolist() == pytest.approx([-math.exp(0.1), 2 * math.exp(-0.3) - 0.5, -math.exp(0.5)])
