"""Log-probs and entropies from logits that are overwritten by their gradient are those of torch's operations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlhf_forward import entropy, token_log_probs
from rlhf_passes import lean_logits as module
from rlhf_passes.lean_logits import can_reuse, lean_log_probs

ROWS, VOCABULARY = 11, 40


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows at a time."""
    monkeypatch.setattr(module, "MIN_LOGITS", 0)
    monkeypatch.setattr(module, "CHUNK_LOGITS", 3 * VOCABULARY)


def given() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    logits = 3 * torch.randn(ROWS, VOCABULARY)
    logits[2, 5:] = -torch.inf
    logits[4, 7] = 80.0
    labels = torch.randint(0, VOCABULARY, (ROWS,))
    labels[2] = 3
    return logits, labels


def gradient(log_probs: Tensor, entropies: Tensor | None, logits: Tensor) -> Tensor:
    weights = torch.linspace(-1, 2, ROWS)
    total = (log_probs * weights).sum()
    if entropies is not None and entropies.requires_grad:
        total = total + (entropies * weights.flip(0)).sum()
    return torch.autograd.grad(total, logits)[0]


def exact_gradient(labels: Tensor, temperature: float, *, with_entropy: bool) -> Tensor:
    """`gradient` in float64, which both float32 results are compared with: each rounds, in another order."""
    logits = given()[0].double().requires_grad_()
    scaled = logits / temperature
    normalised = scaled - scaled.logsumexp(-1, keepdim=True)
    log_probs = normalised.gather(-1, labels[:, None])[:, 0]
    if not with_entropy:
        return gradient(log_probs, None, logits)
    finite = normalised.clamp(min=-1e30)
    return gradient(log_probs, -(normalised.exp() * finite).sum(-1), logits)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("with_entropy", "entropy_grad"), [(True, True), (True, False), (False, True)])
def test_values_and_gradients_are_those_of_torch(temperature: float, with_entropy: bool, entropy_grad: bool) -> None:
    plain, labels = given()
    ours = plain.clone().requires_grad_()
    plain.requires_grad_()
    expected = token_log_probs(plain, labels, temperature)
    with torch.set_grad_enabled(entropy_grad):
        expected_entropies = entropy(plain, temperature) if with_entropy else None
    logits = ours * 1.0  # as a model makes them
    found, entropies = lean_log_probs(logits, labels, temperature, with_entropy=with_entropy, entropy_grad=entropy_grad)
    assert torch.equal(found, expected)
    assert (entropies is None) == (expected_entropies is None)
    if entropies is not None and expected_entropies is not None:
        assert torch.equal(entropies, expected_entropies)
        assert entropies.requires_grad == entropy_grad
    exact = exact_gradient(labels, temperature, with_entropy=entropies is not None and entropies.requires_grad)
    torch_error = (gradient(expected, expected_entropies, plain) - exact).abs().max()
    assert (gradient(found, entropies, ours) - exact).abs().max() <= 1.5 * torch_error + 1e-7


def test_the_gradient_takes_the_place_of_the_logits() -> None:
    plain, labels = given()
    logits = plain.clone().requires_grad_()
    found, _ = lean_log_probs(logits, labels, 1.0, with_entropy=False, entropy_grad=False)
    (grads,) = torch.autograd.grad(found.sum(), logits)
    assert grads.data_ptr() == logits.data_ptr()


def test_a_second_backward_pass_is_refused() -> None:
    plain, labels = given()
    logits = plain.clone().requires_grad_() * 1.0
    found, _ = lean_log_probs(logits, labels, 1.0, with_entropy=False, entropy_grad=False)
    found.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.sum().backward()


def test_other_types_and_small_outputs_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.zeros(ROWS, VOCABULARY)
    assert can_reuse(logits) and not can_reuse(logits.bfloat16()) and not can_reuse(logits[None])
    monkeypatch.setattr(module, "MIN_LOGITS", logits.numel() + 1)
    assert not can_reuse(logits)
