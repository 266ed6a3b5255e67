"""Losses of pairs and of judged answers by hand, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from rlhf_objective.functional.preferences import dpo_loss, score
from rlhf_offline.config import DPOConfig
from rlhf_offline.kto import kto_loss
from rlhf_offline.orpo import log_odds, orpo_loss
from rlhf_offline.reward_model import bradley_terry_loss
from rlhf_offline.simpo import simpo_loss


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def test_bradley_terry() -> None:
    chosen, rejected = torch.tensor([2.0, 0.0]), torch.tensor([1.0, 0.0])
    plain = bradley_terry_loss(chosen, rejected)
    assert plain.losses.tolist() == pytest.approx([-log_sigmoid(1.0), math.log(2.0)])
    assert (plain.chosen_rewards - plain.rejected_rewards).tolist() == [1.0, 0.0]
    full = bradley_terry_loss(chosen, rejected, margin=torch.tensor([0.5, 1.0]), centring_coef=0.01)
    assert full.losses.tolist() == pytest.approx([-log_sigmoid(0.5) + 0.09, -log_sigmoid(-1.0)])


LOG_PROBS = [torch.tensor([x]) for x in (-1.0, -4.0, -2.5, -3.0)]
X, Y, BETA, S = 1.5, -1.0, 0.4, 0.1
"""The log-ratios of chosen and rejected that these make."""

BY_HAND: dict[str, Callable[[], float]] = {
    "sigmoid": lambda: -log_sigmoid(BETA * (X - Y)),
    "ipo": lambda: (X - Y - 1 / (2 * BETA)) ** 2,
    "hinge": lambda: max(0.0, 1 - BETA * (X - Y)),
    "robust": lambda: -log_sigmoid(BETA * (X - Y)),
    "nca": lambda: -log_sigmoid(BETA * X) - 0.5 * log_sigmoid(-BETA * X) - 0.5 * log_sigmoid(-BETA * Y),
    "apo-zero": lambda: 1 - sigmoid(BETA * X) + sigmoid(BETA * Y),
    "apo-down": lambda: sigmoid(BETA * X) + 1 - sigmoid(BETA * (X - Y)),
}


def loss_of(chosen: Any, rejected: Any, reference_chosen: Any, reference_rejected: Any, **options: Any) -> Any:
    return dpo_loss(chosen - reference_chosen, rejected - reference_rejected, **options)


@pytest.mark.parametrize("kind", BY_HAND)
def test_dpo_by_hand(kind: Any) -> None:
    result = loss_of(*LOG_PROBS, beta=BETA, kind=kind)
    assert result.losses.item() == pytest.approx(BY_HAND[kind](), abs=1e-6)
    assert result.chosen_rewards.item() == pytest.approx(BETA * X)
    assert result.rejected_rewards.item() == pytest.approx(BETA * Y)
    assert result.chosen_rewards > result.rejected_rewards


def test_smoothed_labels() -> None:
    good, bad = -log_sigmoid(BETA * (X - Y)), -log_sigmoid(-BETA * (X - Y))
    conservative = loss_of(*LOG_PROBS, beta=BETA, label_smoothing=S).losses.item()
    assert conservative == pytest.approx((1 - S) * good + S * bad)
    robust = loss_of(*LOG_PROBS, beta=BETA, kind="robust", label_smoothing=S).losses.item()
    assert robust == pytest.approx(((1 - S) * good - S * bad) / (1 - 2 * S))
    flipped = loss_of(*(LOG_PROBS[i] for i in (1, 0, 3, 2)), beta=BETA, kind="robust", label_smoothing=S).losses.item()
    assert (1 - S) * robust + S * flipped == pytest.approx(good), "its mean over flipped labels is the clean loss"


def test_without_a_reference_the_ratios_are_the_policys() -> None:
    free = dpo_loss(*LOG_PROBS[:2], beta=0.1)
    assert free.losses.item() == pytest.approx(-log_sigmoid(0.3))  # h = -1 + 4


@pytest.mark.parametrize(
    ("divergence", "derivative"),
    [
        ("reverse-kl", lambda u: math.log(u)),
        ("forward-kl", lambda u: -1 / u),
        ("jsd", lambda u: math.log(u / (1 + u))),
        ("alpha", lambda u: (1 - u**-0.3) / 0.3),
    ],
)
def test_divergences(divergence: Any, derivative: Callable[[float], float]) -> None:
    for kind, of in (("sigmoid", lambda h: -log_sigmoid(BETA * h)), ("hinge", lambda h: max(0.0, 1 - BETA * h))):
        found = loss_of(*LOG_PROBS, beta=BETA, kind=kind, divergence=divergence, alpha=0.3)
        h = derivative(math.exp(X)) - derivative(math.exp(Y))
        assert found.losses.item() == pytest.approx(of(h), rel=1e-5, abs=1e-7)
    far = score(torch.tensor([-500.0, 500.0]), divergence, 0.3)
    assert bool(torch.isfinite(far).all()) and far[0] < far[1]


def test_alpha_lies_between_the_kls() -> None:
    ratios = torch.tensor([-2.0, -0.5, 0.7, 3.0])
    assert torch.allclose(score(ratios, "alpha", 1e-4), score(ratios, "reverse-kl", 0.5), atol=1e-3)
    assert torch.allclose(score(ratios, "alpha", 1 - 1e-4), 1 + score(ratios, "forward-kl", 0.5), atol=1e-2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "ipo", "label_smoothing": 0.1}, "label_smoothing requires"),
        ({"label_smoothing": 0.5}, "less than 0.5"),
        ({"loss": "cubic"}, "Input should be 'sigmoid'"),
        ({"loss": "nca", "divergence": "jsd"}, "divergence jsd requires loss sigmoid, robust or hinge"),
        ({"divergence": "hellinger"}, "Input should be 'reverse-kl'"),
    ],
)
def test_wrong_dpo_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DPOConfig.model_validate(options)


def test_orpo_by_hand() -> None:
    chosen, rejected = math.log(0.8), math.log(0.3)
    found = orpo_loss(torch.tensor([chosen, rejected]), torch.tensor([rejected, chosen]), odds_coef=0.25)
    ratio = math.log(0.8 / 0.2) - math.log(0.3 / 0.7)
    expected = [-chosen - 0.25 * log_sigmoid(ratio), -rejected - 0.25 * log_sigmoid(-ratio)]
    assert found.losses.tolist() == pytest.approx(expected, rel=1e-5)
    assert (found.chosen_rewards > found.rejected_rewards).tolist() == [True, False]
    sure = torch.zeros(1, requires_grad=True)
    (gradient,) = torch.autograd.grad(log_odds(sure).sum(), sure)
    assert math.isfinite(log_odds(sure).item()) and math.isfinite(gradient.item())


def test_simpo_by_hand() -> None:
    found = simpo_loss(torch.tensor([-0.5]), torch.tensor([-0.9]), beta=2.0, gamma=0.5)
    assert found.losses.item() == pytest.approx(-log_sigmoid(2.0 * 0.4 - 0.5), rel=1e-5)
    assert (found.chosen_rewards - found.rejected_rewards).item() == pytest.approx(0.8)


def test_kto_by_hand() -> None:
    ratios, good = torch.tensor([1.5, -0.5, 2.0]), torch.tensor([True, True, False])
    found = kto_loss(ratios, good, 0.75, beta=0.4, desirable_weight=1.5, undesirable_weight=0.5)
    expected = [1.5 * (1 - sigmoid(0.3)), 1.5 * (1 - sigmoid(-0.5)), 0.5 * (1 - sigmoid(-0.5))]
    assert found.tolist() == pytest.approx(expected, rel=1e-5)
