"""Muon and 8-bit AdamW over 50 steps, against float64 loops that share nothing with them."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlhf_core.plugins.selected import load

STEPS, LR, DECAY, EPS = 50, 0.01, 0.05, 1e-8


def gradient(shape: tuple[int, ...], step: int) -> Tensor:
    """A part that stays, so that momentum matters, and noise."""
    draw = torch.Generator().manual_seed(7)
    kept = torch.randn(shape, generator=draw)
    return kept + torch.randn(shape, generator=draw.manual_seed(100 + step))


def trained(name: str, weight: nn.Parameter, **options: Any) -> Tensor:
    """The weight after 50 steps of an optimizer."""
    selected = load("optimizers", name)
    context: Any = SimpleNamespace(parameters={"layer.weight": weight}, lr=LR, strategy=None)
    optimizer = selected.build(selected.component.config(weight_decay=DECAY, **options), context)
    for step in range(STEPS):
        weight.grad = gradient(tuple(weight.shape), step)
        optimizer.step()
    return weight.detach()


def quintic(matrix: Tensor, num_steps: int) -> Tensor:
    """U p(S) V^T with p five times the polynomial on the singular values, which Newton-Schulz computes without them."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / matrix.square().sum().sqrt()
    for _ in range(num_steps):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left @ torch.diag(values) @ right


@pytest.mark.parametrize("shape", [(24, 8), (8, 24), (16, 16)])
@pytest.mark.parametrize(("nesterov", "adjust"), [(True, "match_rms_adamw"), (False, "original")])
def test_muon(shape: tuple[int, int], nesterov: bool, adjust: str) -> None:
    start = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    found = trained("muon", nn.Parameter(start.clone()), nesterov=nesterov, adjust_lr=adjust, momentum=0.9)
    rows, columns = shape
    factor = 0.2 * math.sqrt(max(shape)) if adjust == "match_rms_adamw" else math.sqrt(max(1.0, rows / columns))
    weight, momentum = start.double(), torch.zeros(shape, dtype=torch.float64)
    for step in range(STEPS):
        each = gradient(shape, step).double()
        momentum = 0.9 * momentum + 0.1 * each
        direction = 0.1 * each + 0.9 * momentum if nesterov else momentum
        weight = (1 - LR * DECAY) * weight - LR * factor * quintic(direction, 5)
    # The iteration runs in bfloat16, whose products have three digits.
    assert (found.double() - weight).norm() < 0.02 * (weight - start).norm()


def adamw(start: Tensor) -> Tensor:
    weight = start.double()
    mean, square = torch.zeros_like(weight), torch.zeros_like(weight)
    for step in range(1, STEPS + 1):
        each = gradient(tuple(start.shape), step - 1).double()
        mean, square = 0.9 * mean + 0.1 * each, 0.999 * square + 0.001 * each**2
        corrected = mean / (1 - 0.9**step), square / (1 - 0.999**step)
        weight = weight * (1 - LR * DECAY) - LR * corrected[0] / (corrected[1].sqrt() + EPS)
    return weight


@pytest.mark.parametrize(("shape", "error"), [((80, 90), 0.05), ((30, 40), 1e-5)], ids=["8 bits", "small: 32 bits"])
def test_adamw_with_eight_bits(shape: tuple[int, int], error: float) -> None:
    """Moments of 8 bits have errors of some percent. Parameters below 4,096 elements keep 32 bits."""
    pytest.importorskip("bitsandbytes")
    start = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    found, expected = trained("adamw-8bit", nn.Parameter(start.clone())), adamw(start)
    assert (found.double() - expected).norm() < error * (expected - start).norm()
