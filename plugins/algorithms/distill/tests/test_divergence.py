"""The divergences against loops over probabilities in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_distill.divergence import LEAST_REST, divergence, with_rest

KINDS = ("reverse-kl", "forward-kl", "jsd")


def slow(p: list[float], t: list[float], kind: str, weight: float) -> float:
    """p, t: whole distributions, probability by probability."""

    def kl(one: list[float], other: list[float]) -> float:
        return math.fsum(a * math.log(a / b) for a, b in zip(one, other, strict=True) if a > 0)

    if kind == "reverse-kl":
        return kl(p, t)
    if kind == "forward-kl":
        return kl(t, p)
    mixture = [weight * b + (1 - weight) * a for a, b in zip(p, t, strict=True)]
    return weight * kl(t, mixture) + (1 - weight) * kl(p, mixture)


def drawn(seed: int, size: int) -> torch.Tensor:
    return torch.randn(3, size, generator=torch.Generator().manual_seed(seed)).log_softmax(-1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kept", [1, 4, 8])
@pytest.mark.parametrize("weight", [0.1, 0.5])
def test_divergence_of_the_likeliest_and_the_rest(kind: str, kept: int, weight: float) -> None:
    policy, teacher = drawn(1, 9), drawn(2, 9)
    ids = teacher.topk(kept).indices
    found = divergence(policy.gather(-1, ids), teacher.gather(-1, ids), kind, jsd_weight=weight)  # type: ignore[arg-type]
    for row in range(3):
        sides = []
        for log_probs in (policy, teacher):
            known = [math.exp(float(log_probs[row, i])) for i in ids[row].tolist()]
            sides.append([*known, 1.0 - math.fsum(known)])
        assert found[row].item() == pytest.approx(slow(*sides, kind, weight), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_over_all_tokens_it_is_that_of_the_whole_vocabulary(kind: str) -> None:
    policy, teacher = drawn(1, 9), drawn(2, 9)
    found = divergence(policy, teacher, kind)  # type: ignore[arg-type]
    for row in range(3):
        whole = slow(policy[row].double().exp().tolist(), teacher[row].double().exp().tolist(), kind, 0.5)
        assert found[row].item() == pytest.approx(whole, abs=1e-4)
        fewer = teacher[row].topk(3).indices
        assert divergence(policy[row, fewer], teacher[row, fewer], kind).item() <= whole + 1e-5  # type: ignore[arg-type]


def test_jsd_tends_to_the_kls_at_its_ends() -> None:
    policy, teacher = drawn(1, 9), drawn(2, 9)
    for weight, kind in ((1e-3, "forward-kl"), (1 - 1e-3, "reverse-kl")):
        jsd = divergence(policy, teacher, "jsd", jsd_weight=weight)
        kl = divergence(policy, teacher, kind)  # type: ignore[arg-type]
        assert torch.allclose(jsd / min(weight, 1 - weight), kl, rtol=0.02)


@given(st.integers(0, 10_000), st.integers(1, 9), st.sampled_from(KINDS))
def test_it_is_never_negative_and_nothing_at_equality(seed: int, kept: int, kind: str) -> None:
    policy, teacher = 3 * drawn(seed, 9), drawn(seed + 1, 9)
    policy = policy.log_softmax(-1)
    assert (divergence(policy[:, :kept], teacher[:, :kept], kind) >= -1e-5).all()  # type: ignore[arg-type]
    assert torch.allclose(divergence(teacher[:, :kept], teacher[:, :kept], kind), torch.zeros(3), atol=1e-6)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_a_distribution_that_the_k_tokens_exhaust_has_finite_gradients(kind: str) -> None:
    policy = torch.tensor([[0.0, -40.0]]).log_softmax(-1).requires_grad_()
    teacher = torch.tensor([[-1e-9, -30.0]])
    assert with_rest(teacher)[0, -1].item() == pytest.approx(math.log(LEAST_REST), rel=1e-2)
    divergence(policy, teacher, kind).sum().backward()  # type: ignore[arg-type]
    assert policy.grad is not None and bool(torch.isfinite(policy.grad).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rest", [1e-3, 1e-5, 2e-6])
def test_a_small_rest_is_exact(kind: str, rest: float) -> None:
    """Log-probs of 16 tokens that leave 0.3 and `rest`: float32 knows 1 - sum to 1e-7 only, 5% of the least rest."""
    shares = torch.arange(1.0, 17.0, dtype=torch.float64)
    sides = [weights / weights.sum() * kept for weights, kept in ((shares, 0.7), (shares.flip(0), 1.0 - rest))]
    # What is given is float32: the reference takes the rounded numbers.
    policy, teacher = (side.log().float() for side in sides)
    whole = []
    for log_probs in (policy, teacher):
        known = [math.exp(value) for value in log_probs.tolist()]
        whole.append([*known, 1.0 - math.fsum(known)])
    found = divergence(policy, teacher, kind)  # type: ignore[arg-type]
    assert found.dtype is torch.float32
    assert found.item() == pytest.approx(slow(*whole, kind, 0.5), rel=1e-6)


def test_another_divergence_is_refused() -> None:
    with pytest.raises(ValueError, match="reverse-kl, forward-kl or jsd"):
        divergence(drawn(1, 3), drawn(2, 3), "tv")  # type: ignore[arg-type]
