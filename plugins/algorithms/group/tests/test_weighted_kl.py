"""`kl_ratio` in the loss: its sum and its gradient, against autograd in float64 over the model's own logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlhf_testing.models import tiny_model

LENGTHS = [3, 1, 5, 2]


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_kl_of_the_loss(
    estimator: str, weighted: bool, algorithm: Callable[..., Any], episode: Callable[..., Any]
) -> None:
    draw = torch.Generator().manual_seed(5)
    shape = (len(LENGTHS), max(LENGTHS))
    old, reference = -3 * torch.rand(shape, generator=draw), -3 * torch.rand(shape, generator=draw)
    given = episode([1.0, 0.0, 2.0, 1.0], [0, 0, 1, 1], LENGTHS, action_log_probs=old, reference_log_probs=reference)
    tokens = torch.randint(3, 15, given.sequences.shape, generator=draw)
    batch = replace(given, sequences=torch.where(given.attention_mask, tokens, 0), advantages=torch.zeros(shape))
    made = algorithm("grpo", {"kl_coef": 0.5, "kl_estimator": estimator, "kl_ratio": weighted})

    model = tiny_model(seed=2)
    found = made.loss({"policy": model}, batch).sums["kl"]
    found.backward()

    exact = tiny_model(seed=2).double()
    expected = torch.zeros((), dtype=torch.float64)
    for row, length in enumerate(LENGTHS):
        ids = batch.sequences[row : row + 1, : 2 + length]
        log_probs = exact(ids).logits[0].log_softmax(-1)
        for place in range(length):
            current = log_probs[1 + place, ids[0, 2 + place]]
            gap = reference[row, place].double() - current
            kl = -gap if estimator == "k1" else gap.exp() - gap - 1
            ratio = (current - old[row, place].double()).exp() if weighted else 1.0
            expected = expected + ratio * kl
    expected.backward()
    assert found.detach().item() == pytest.approx(expected.detach().item(), rel=1e-5)
    for one, other in zip(model.parameters(), exact.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=1e-4, atol=1e-5)
