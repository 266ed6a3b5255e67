"""Every loss against hand-derived numbers and a float64 loop, and nothing that leaks from under a mask."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlhf_objective import (
    cispo_policy_loss,
    importance_ratio,
    masked_cross_entropy,
    off_policy_correction,
    ppo_policy_loss,
    value_loss,
)

NUMBERS = st.floats(-3, 3, width=32)


def ones(*shape: int) -> Tensor:
    return torch.ones(*shape, dtype=torch.bool)


def test_ppo_by_hand() -> None:
    ratios = torch.tensor([[1.5, 0.5, 1.5, 0.5, 1.0, 9.0]])
    advantages = torch.tensor([[1.0, 1.0, -1.0, -1.0, 2.0, -1.0]])
    result = ppo_policy_loss(
        ratios.log(), torch.zeros(1, 6), advantages, ones(1, 6), clip_eps_low=0.2, clip_eps_high=0.3, dual_clip=3.0
    )
    torch.testing.assert_close(result.losses, torch.tensor([[-1.3, -0.5, 1.5, 0.8, -2.0, 3.0]]))
    assert result.clipped.tolist() == [[True, False, False, True, False, False]]
    assert result.dual_clipped.tolist() == [[False, False, False, False, False, True]]
    torch.testing.assert_close(result.ratio, ratios)


@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS, st.booleans()), min_size=1, max_size=8), st.booleans())
def test_ppo_equals_a_loop(tokens: list[tuple[float, float, float, bool]], dual: bool) -> None:
    new, old, advantages = (torch.tensor([[token[i] for token in tokens]]) for i in range(3))
    mask = torch.tensor([[token[3] for token in tokens]])
    result = ppo_policy_loss(
        new, old, advantages, mask, clip_eps_low=0.1, clip_eps_high=0.3, dual_clip=2.0 if dual else None
    )
    expected = []
    for log_prob, old_log_prob, advantage, counts in tokens:
        ratio = math.exp(log_prob - old_log_prob)
        objective = min(ratio * advantage, min(max(ratio, 0.9), 1.3) * advantage)
        if dual and advantage < 0:
            objective = max(objective, 2.0 * advantage)
        expected.append(-objective if counts else 0.0)
    assert result.losses[0].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_the_clip_stops_the_gradient() -> None:
    log_probs = torch.tensor([[0.5, 0.0]], requires_grad=True)
    result = ppo_policy_loss(
        log_probs, torch.zeros(1, 2), torch.ones(1, 2), ones(1, 2), clip_eps_low=0.2, clip_eps_high=0.2
    )
    result.losses.sum().backward()
    assert log_probs.grad is not None and log_probs.grad.tolist() == [[0.0, -1.0]]


def test_log_ratios_are_bounded_before_exp() -> None:
    ratio = importance_ratio(torch.tensor([[500.0, -500.0]]), torch.zeros(1, 2), ones(1, 2))
    assert ratio[0].tolist() == pytest.approx([math.exp(20.0), math.exp(-20.0)], rel=1e-5)


def test_sequence_ratio_is_gspo() -> None:
    log_probs = torch.tensor([[0.1, 0.3, 9.0], [0.2, 0.0, 0.0]], requires_grad=True)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    ratio = importance_ratio(log_probs, torch.zeros(2, 3), mask, "sequence")
    first, second = math.exp(0.2), math.exp(0.2 / 3)
    torch.testing.assert_close(ratio, torch.tensor([[first, first, 1.0], [second] * 3]))
    # With one advantage a sequence, the mean over tokens has the gradient of s_i(theta) itself.
    (gradient,) = torch.autograd.grad(ratio[0, :2].mean(), log_probs)
    torch.testing.assert_close(gradient, torch.tensor([[first / 2, first / 2, 0.0], [0.0] * 3]))
    with pytest.raises(ValueError, match="'word'"):
        importance_ratio(log_probs, log_probs, mask, "word")  # type: ignore[arg-type]


def test_cispo_clips_the_weight_and_keeps_the_gradient() -> None:
    log_probs = torch.tensor([[-0.5, -2.0, -1.0]], requires_grad=True)
    old = torch.tensor([[-1.5, -1.0, -1.0]])
    advantages = torch.tensor([[2.0, 1.0, -1.0]])
    result = cispo_policy_loss(log_probs, old, advantages, ones(1, 3), clip_eps_low=1.0, clip_eps_high=0.5)
    weights = torch.tensor([[1.5, math.exp(-1.0), 1.0]])
    torch.testing.assert_close(result.losses.detach(), -weights * advantages * log_probs.detach())
    assert result.clipped.tolist() == [[True, False, False]]
    result.losses.sum().backward()
    torch.testing.assert_close(log_probs.grad, -weights * advantages)


def test_value_loss_by_hand() -> None:
    values, old = torch.tensor([[1.0, 0.0, 3.0]]), torch.tensor([[0.0, 0.0, 0.0]])
    returns = torch.tensor([[2.0, 1.0, 1.0]])
    clipped = value_loss(values, old, returns, ones(1, 3), clip_eps=0.5)
    torch.testing.assert_close(clipped.losses, torch.tensor([[1.125, 0.5, 2.0]]))
    assert clipped.clipped.tolist() == [[True, False, False]]
    plain = value_loss(values, old, returns, ones(1, 3), clip_eps=None)
    torch.testing.assert_close(plain.losses, torch.tensor([[0.5, 0.5, 2.0]]))
    assert not plain.clipped.any()


@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=8))
def test_value_loss_equals_a_loop(tokens: list[tuple[float, float, float]]) -> None:
    values, old, returns = (torch.tensor([[token[i] for token in tokens]]) for i in range(3))
    result = value_loss(values, old, returns, ones(*values.shape), clip_eps=0.2)
    expected = [
        0.5 * max((v - r) ** 2, (min(max(v, o - 0.2), o + 0.2) - r) ** 2) for v, o, r in tokens
    ]  # fmt: skip
    assert result.losses[0].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_truncated_importance_sampling() -> None:
    trainer = torch.tensor([[0.0, math.log(3.0), math.nan]], requires_grad=True)
    mask = torch.tensor([[True, True, False]])
    result = off_policy_correction(trainer, torch.zeros(1, 3), mask, cap=2.0)
    torch.testing.assert_close(result.weights, torch.tensor([[1.0, 2.0, 0.0]]))
    assert not result.weights.requires_grad
    assert result.truncated.tolist() == [[False, True, False]]
    assert float(result.effective_sample_size) == pytest.approx(9.0 / (2 * 5.0))
    empty = off_policy_correction(trainer, trainer, torch.zeros_like(mask), cap=2.0)
    assert empty.effective_sample_size == 0.0


Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
LOSSES: dict[str, Loss] = {
    "ppo": lambda x, y, z, m: ppo_policy_loss(x, y, z, m, clip_eps_low=0.2, clip_eps_high=0.2, dual_clip=3.0).losses,
    "gspo": lambda x, y, z, m: (
        ppo_policy_loss(x, y, z, m, clip_eps_low=0.2, clip_eps_high=0.2, ratio_level="sequence").losses
    ),
    "cispo": lambda x, y, z, m: cispo_policy_loss(x, y, z, m, clip_eps_low=0.2, clip_eps_high=0.2).losses,
    "value": lambda x, y, z, m: value_loss(x, y, z, m, clip_eps=0.2).losses,
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_nothing_leaks_from_under_the_mask(name: str, poison: float) -> None:
    mask = torch.tensor([[True, False, True], [False, False, False]])
    inputs = [torch.where(mask, torch.full((2, 3), 0.1 * i), poison).requires_grad_() for i in range(3)]
    losses = LOSSES[name](*inputs, mask)
    assert (losses[~mask] == 0).all() and torch.isfinite(losses).all()
    gradients = torch.autograd.grad(losses.sum(), inputs, allow_unused=True)
    for gradient in gradients:
        assert gradient is None or (torch.isfinite(gradient).all() and (gradient[~mask] == 0).all())


def test_cross_entropy_reads_no_masked_logit() -> None:
    logits = torch.zeros(1, 3, 4)
    logits[0, 1] = math.nan
    logits.requires_grad_()
    mask = torch.tensor([[True, False, True]])
    losses = masked_cross_entropy(logits, torch.tensor([[1, -100, 2]]), mask)
    torch.testing.assert_close(losses, torch.tensor([[math.log(4.0), 0.0, math.log(4.0)]]))
    losses.sum().backward()
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad[0, 0], torch.tensor([0.25, -0.75, 0.25, 0.25]))
    assert (logits.grad[0, 1] == 0).all()
    empty = masked_cross_entropy(logits, torch.zeros(1, 3, dtype=torch.int64), torch.zeros_like(mask))
    empty.sum().backward()
    assert (empty == 0).all()


def test_a_small_dual_clip_is_refused() -> None:
    x = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="dual_clip"):
        ppo_policy_loss(x, x, x, ones(1, 1), clip_eps_low=0.2, clip_eps_high=0.2, dual_clip=1.0)
