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


def all_of(log_probs: torch.Tensor) -> torch.Tensor:
    """Of all tokens, which leave no rest."""
    return with_rest(log_probs, torch.arange(log_probs.shape[-1]).expand(log_probs.shape))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kept", [1, 4, 8])
@pytest.mark.parametrize("weight", [0.1, 0.5])
def test_divergence_of_the_likeliest_and_the_rest(kind: str, kept: int, weight: float) -> None:
    policy, teacher = drawn(1, 9), drawn(2, 9)
    ids = teacher.topk(kept).indices
    found = divergence(with_rest(policy, ids), with_rest(teacher, ids), kind, jsd_weight=weight)  # type: ignore[arg-type]
    for row in range(3):
        sides = []
        for log_probs in (policy, teacher):
            known = [math.exp(float(log_probs[row, i])) for i in ids[row].tolist()]
            sides.append([*known, 1.0 - math.fsum(known)])
        assert found[row].item() == pytest.approx(slow(*sides, kind, weight), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_over_all_tokens_it_is_that_of_the_whole_vocabulary(kind: str) -> None:
    policy, teacher = drawn(1, 9), drawn(2, 9)
    found = divergence(all_of(policy), all_of(teacher), kind)  # type: ignore[arg-type]
    for row in range(3):
        whole = slow(policy[row].double().exp().tolist(), teacher[row].double().exp().tolist(), kind, 0.5)
        assert found[row].item() == pytest.approx(whole, abs=1e-4)
        fewer = teacher[row].topk(3).indices
        some = divergence(with_rest(policy[row], fewer), with_rest(teacher[row], fewer), kind)  # type: ignore[arg-type]
        assert some.item() <= whole + 1e-5


def test_jsd_tends_to_the_kls_at_its_ends() -> None:
    policy, teacher = all_of(drawn(1, 9)), all_of(drawn(2, 9))
    for weight, kind in ((1e-3, "forward-kl"), (1 - 1e-3, "reverse-kl")):
        jsd = divergence(policy, teacher, "jsd", jsd_weight=weight)
        kl = divergence(policy, teacher, kind)  # type: ignore[arg-type]
        assert torch.allclose(jsd / min(weight, 1 - weight), kl, rtol=0.02)


@given(st.integers(0, 10_000), st.integers(1, 9), st.sampled_from(KINDS))
def test_it_is_never_negative_and_nothing_at_equality(seed: int, kept: int, kind: str) -> None:
    policy, teacher = 3 * drawn(seed, 9), drawn(seed + 1, 9)
    ids = torch.arange(kept).expand(3, kept)
    ours, its = with_rest(policy, ids), with_rest(teacher, ids)
    assert (divergence(ours, its, kind) >= -1e-5).all()  # type: ignore[arg-type]
    assert torch.allclose(divergence(its, its, kind), torch.zeros(3), atol=1e-6)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kept", [1, 2])
def test_a_distribution_that_the_k_tokens_exhaust_has_finite_gradients(kind: str, kept: int) -> None:
    policy, teacher = torch.tensor([[0.0, -40.0]]).requires_grad_(), torch.tensor([[0.0, -30.0]])
    ids = torch.arange(kept)[None]
    its = with_rest(teacher, ids)
    assert its[0, -1].item() == pytest.approx(math.log(LEAST_REST), rel=1e-5)
    divergence(with_rest(policy, ids), its, kind).sum().backward()  # type: ignore[arg-type]
    assert policy.grad is not None and bool(torch.isfinite(policy.grad).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shift", [0.0, 20.0])
@pytest.mark.parametrize("rest", [1e-3, 1e-5, 2e-6])
def test_a_small_rest_is_exact(kind: str, shift: float, rest: float) -> None:
    """Float32 logits of 64 tokens, of which 16 leave 0.3 and `rest`; the reference is the same in float64."""
    shares = torch.arange(1.0, 17.0, dtype=torch.float64)
    sides = []
    for weights, kept in ((shares, 0.7), (shares.flip(0), 1.0 - rest)):
        whole = torch.cat([weights / weights.sum() * kept, torch.full((48,), (1.0 - kept) / 48, dtype=torch.float64)])
        sides.append((whole.log() + shift).float())
    ids = torch.arange(16)
    exact = []
    for logits in sides:
        probs = logits.double().softmax(-1).tolist()
        exact.append([*probs[:16], math.fsum(probs[16:])])
    policy, teacher = (with_rest(logits, ids) for logits in sides)
    found = divergence(policy, teacher, kind)  # type: ignore[arg-type]
    assert found.dtype is torch.float32
    assert found.item() == pytest.approx(slow(*exact, kind, 0.5), rel=2e-5)


def test_another_divergence_is_refused() -> None:
    with pytest.raises(ValueError, match="reverse-kl, forward-kl or jsd"):
        divergence(drawn(1, 3), drawn(2, 3), "tv")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["reverse-kl", "forward-kl", "jsd"])
@pytest.mark.parametrize("allowed", [1, 2, 4])
def test_tokens_that_a_structure_excludes_count_as_zero(kind: str, allowed: int) -> None:
    """With fewer allowed tokens than K, the divergence is that over the allowed ones, with finite gradients."""
    policy, teacher = torch.randn(3, 8, requires_grad=True), torch.randn(3, 8)
    excluded = torch.arange(8) >= allowed
    ids = teacher.masked_fill(excluded, -torch.inf).topk(5).indices
    pairs = [with_rest(each.masked_fill(excluded, -torch.inf), ids) for each in (policy, teacher)]
    found = divergence(*pairs, kind)  # type: ignore[arg-type]
    plain = [each[:, :allowed].log_softmax(-1) for each in (policy, teacher)]
    torch.testing.assert_close(found, divergence(*plain, kind), rtol=1e-4, atol=1e-5)  # type: ignore[arg-type]
    found.sum().backward()
    assert policy.grad is not None and policy.grad.isfinite().all()
