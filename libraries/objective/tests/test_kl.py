"""KL estimators and controllers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_objective import KLController, kl_estimate


def test_estimators_by_hand() -> None:
    log_probs, reference = torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -1.0])
    assert kl_estimate(log_probs, reference, "k1").tolist() == [1.0, -1.0]
    assert kl_estimate(log_probs, reference, "k2").tolist() == [0.5, 0.5]
    expected = [math.exp(-1.0), math.exp(1.0) - 2.0]
    assert kl_estimate(log_probs, reference, "k3").tolist() == pytest.approx(expected, rel=1e-6)


def test_the_distance_by_hand() -> None:
    assert kl_estimate(torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -1.0]), "abs").tolist() == [1.0, 1.0]


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_straight_through_has_the_value_of_one_and_the_gradient_of_k2(name: str) -> None:
    """d/dlogp of d^2 / 2 is d, whose mean is the gradient of the KL."""
    log_probs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    reference = torch.tensor([-2.0, -1.5, -3.0])
    found = kl_estimate(log_probs, reference, f"{name}+")  # type: ignore[arg-type]
    assert found.tolist() == kl_estimate(log_probs, reference, name).tolist()  # type: ignore[arg-type]
    assert torch.autograd.grad(found.sum(), log_probs)[0].tolist() == pytest.approx([1.0, -0.5, 0.0])


def test_only_straight_through_and_k2_have_the_gradient_of_the_kl() -> None:
    """Of a policy of three tokens, over all of them: sum p d(estimate) is the derivative of sum p log(p / q)."""
    logits = torch.tensor([0.3, -0.2, 0.8], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    p = torch.log_softmax(logits, -1)
    (exact,) = torch.autograd.grad((p.exp() * (p - q.log())).sum(), logits, retain_graph=True)
    for name, fits in (("k1", False), ("k3", False), ("k2", True), ("k1+", True), ("k3+", True)):
        sampled = (p.exp().detach() * kl_estimate(p, q.log(), name)).sum()  # type: ignore[arg-type]
        (found,) = torch.autograd.grad(sampled, logits, retain_graph=True)
        assert torch.allclose(found, exact, atol=1e-6) == fits, name


@given(st.floats(-60, 0, width=32), st.floats(-60, 0, width=32))
def test_k3_is_finite_and_never_negative(log_prob: float, reference: float) -> None:
    k3 = float(kl_estimate(torch.tensor(log_prob), torch.tensor(reference), "k3"))
    d = max(-20.0, min(20.0, log_prob - reference))
    assert k3 >= 0.0
    assert k3 == pytest.approx(math.exp(-d) - 1.0 + d, rel=1e-4, abs=1e-5)


def test_k1_and_k3_are_unbiased() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.5, 0.3]).double()
    exact = float((p * (p / q).log()).sum())
    for name in ("k1", "k3"):
        assert float((p * kl_estimate(p.log(), q.log(), name)).sum()) == pytest.approx(exact)  # type: ignore[arg-type]


def test_only_the_exponent_is_bounded() -> None:
    far = kl_estimate(torch.tensor([-50.0]), torch.tensor([0.0]), "k3")
    assert float(far) == pytest.approx(math.exp(20.0) - 21.0, rel=1e-6)
    assert kl_estimate(torch.tensor([-50.0]), torch.tensor([0.0]), "k1") == -50.0


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(ValueError, match="'k4'"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")  # type: ignore[arg-type]


def test_adaptive_controller_follows_ziegler() -> None:
    controller = KLController(0.1, target=6.0, horizon=1000)
    controller.update(6.6, num_samples=100)  # error 0.1
    assert controller.value == pytest.approx(0.1 * (1 + 0.1 * 100 / 1000))
    controller.update(600.0, num_samples=100)  # clipped to +0.2
    controller.update(0.0, num_samples=50)  # clipped to -0.2
    assert controller.value == pytest.approx(0.1 * 1.01 * 1.02 * 0.99)


def test_controller_state_survives_a_round_trip() -> None:
    before = KLController(0.1, target=6.0, horizon=1000)
    before.update(60.0, 100)
    after = KLController(0.7, target=6.0, horizon=1000)
    after.load_state_dict(before.state_dict())
    assert after.value == before.value
    with pytest.raises(ValueError, match="value"):
        after.load_state_dict({})


def test_fixed_controller_stays_and_keeps_no_state() -> None:
    controller = KLController(0.05)
    controller.update(100.0, 10)
    assert controller.value == 0.05
    controller.load_state_dict(controller.state_dict())
    with pytest.raises(ValueError, match="value"):
        controller.load_state_dict({"value": 1.0})


def test_controller_needs_positive_target_and_horizon() -> None:
    with pytest.raises(ValueError, match="> 0"):
        KLController(0.1, target=0.0, horizon=10)
