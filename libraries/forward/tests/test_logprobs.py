"""Which position predicts which token, and the distribution log-probs are of."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_forward import entropy, response_logits, token_log_probs
from rlhf_passes.chunked import Chunked


def log_softmax_loop(logits: list[float], temperature: float, kept: list[int]) -> dict[int, float]:
    scaled = {i: logits[i] / temperature for i in kept}
    top = max(scaled.values())
    total = top + math.log(sum(math.exp(v - top) for v in scaled.values()))
    return {i: v - total for i, v in scaled.items()}


def test_the_state_before_a_token_predicts_it() -> None:
    prompt_length, num_actions = 3, 2
    positions = torch.arange(5.0).view(1, 5)
    logits = positions.unsqueeze(-1).expand(1, 5, 4)
    expected = [prompt_length + t - 1.0 for t in range(num_actions)]
    assert response_logits(positions, num_actions).tolist() == [expected]
    assert response_logits(logits, num_actions)[0, :, 0].tolist() == expected
    last = logits[:, -(num_actions + 1) :]
    assert torch.equal(response_logits(last, num_actions), response_logits(logits, num_actions))
    assert response_logits(logits, 0).shape == (1, 0, 4)


def test_a_response_without_a_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="3 positions, got 2"):
        response_logits(torch.zeros(1, 2), 2)


@given(st.data(), st.sampled_from([0.3, 1.0, 2.0]))
def test_log_probs_and_entropy_equal_a_loop(data: st.DataObject, temperature: float) -> None:
    vocabulary = data.draw(st.integers(2, 6))
    logits = data.draw(st.lists(st.floats(-8, 8, width=32), min_size=vocabulary, max_size=vocabulary))
    kept = data.draw(st.lists(st.integers(0, vocabulary - 1), unique=True, max_size=vocabulary))
    width = data.draw(st.integers(len(kept), vocabulary + 1))
    support = torch.tensor(kept + [-1] * (width - len(kept)), dtype=torch.int32)
    expected = log_softmax_loop(logits, temperature, kept or list(range(vocabulary)))
    row = torch.tensor(logits)
    for label in range(vocabulary):
        got = float(token_log_probs(row, torch.tensor(label), temperature, support))
        assert got == pytest.approx(expected.get(label, -math.inf), rel=1e-5, abs=1e-5)
    exact = -sum(math.exp(v) * v for v in expected.values())
    assert float(entropy(row, temperature, support)) == pytest.approx(exact, rel=1e-4, abs=1e-5)


def test_a_batch_may_mix_truncated_and_whole_rows() -> None:
    logits = torch.zeros(2, 4, requires_grad=True)
    support = torch.tensor([[0, 1], [-1, -1]], dtype=torch.int32)
    log_probs = token_log_probs(logits, torch.tensor([0, 0]), 1.0, support)
    entropies = entropy(logits, 1.0, support)
    expected = torch.tensor([math.log(2.0), math.log(4.0)])
    torch.testing.assert_close(-log_probs, expected)
    torch.testing.assert_close(entropies, expected)
    (log_probs.sum() + entropies.sum()).backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[0.5, -0.5, 0.0, 0.0], [0.75, -0.25, -0.25, -0.25]]))


def test_bfloat16_logits_are_computed_in_float32() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    labels = torch.tensor([1, 2, 3])
    expected = torch.log_softmax(logits.double() / 0.7, -1)[torch.arange(3), labels]
    got = token_log_probs(logits, labels, 0.7)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=2e-6)


def test_a_forbidden_token_breaks_no_gradient() -> None:
    logits = torch.tensor([[0.0, 1.0, -math.inf]], requires_grad=True)
    result = token_log_probs(logits, torch.tensor([1])) + entropy(logits)
    result.backward()
    assert torch.isfinite(result).all() and logits.grad is not None and torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("chunk_tokens", [1, 4, 5, 100])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_chunks_give_the_numbers_and_gradients_of_the_plain_path(
    chunk_tokens: int, with_entropy: bool, with_bias: bool
) -> None:
    random = torch.Generator().manual_seed(1)

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).requires_grad_()

    hidden, weight, bias = leaf(10, 8), leaf(11, 8), leaf(11) if with_bias else None
    labels = torch.randint(0, 11, (10,), generator=random)
    weights, entropy_weights = torch.randn(10, generator=random), torch.randn(10, generator=random)
    leaves = [x for x in (hidden, weight, bias) if x is not None]

    logits = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    plain = token_log_probs(logits, labels, 0.7)
    plain_entropy = entropy(logits, 0.7)
    target = (plain * weights).sum() + with_entropy * (plain_entropy * entropy_weights).sum()
    expected = _gradients_in_float64(leaves, labels, weights, with_entropy * entropy_weights)
    for gradient, reference in zip(torch.autograd.grad(target, leaves), expected, strict=True):
        torch.testing.assert_close(gradient.double(), reference, rtol=1e-5, atol=1e-5)

    log_probs, entropies = Chunked(chunk_tokens, 0.7, with_entropy).of(hidden, weight, labels, bias)
    torch.testing.assert_close(log_probs, plain)
    torch.testing.assert_close(entropies, plain_entropy if with_entropy else torch.zeros(10))
    loss = (log_probs * weights).sum() + with_entropy * (entropies * entropy_weights).sum()
    for gradient, reference in zip(torch.autograd.grad(loss, leaves), expected, strict=True):
        torch.testing.assert_close(gradient.double(), reference, rtol=1e-5, atol=1e-5)


def _gradients_in_float64(
    leaves: list[torch.Tensor], labels: torch.Tensor, weights: torch.Tensor, entropy_weights: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Both paths are held against these: two float32 sums in different orders differ by twice what each is off."""
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    hidden, weight, *bias = exact
    logits = hidden @ weight.T + sum(bias)
    log_all = (logits / 0.7).log_softmax(-1)
    chosen = log_all.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    target = (chosen * weights).sum() - ((log_all.exp() * log_all).sum(-1) * entropy_weights).sum()
    return torch.autograd.grad(target, exact)


def test_chunks_never_make_all_logits() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.numel())
            return result

    tokens, vocabulary, width, chunk = 64, 40, 4, 8
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=True)
    with Watch():
        labels = torch.zeros(tokens, dtype=torch.int64)
        log_probs, entropies = Chunked(chunk, with_entropy=True).of(hidden, weight, labels)
        (log_probs.sum() + entropies.sum()).backward()
    assert largest == chunk * vocabulary


def test_chunks_follow_autocast() -> None:
    hidden, weight = torch.randn(6, 8, requires_grad=True), torch.randn(9, 8, requires_grad=True)
    labels = torch.arange(6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = token_log_probs(torch.nn.functional.linear(hidden, weight), labels)
        got, _ = Chunked(4).of(hidden, weight, labels)
    torch.testing.assert_close(got, plain)
    got.sum().backward()
    assert hidden.grad is not None and hidden.grad.dtype == torch.float32
    assert weight.grad is not None and weight.grad.dtype == torch.float32


def test_chunks_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="chunk_tokens"):
        Chunked(0).of(torch.zeros(1, 2), torch.zeros(3, 2), torch.zeros(1, dtype=torch.int64))
