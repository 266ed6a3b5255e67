"""SAPO, GMPO and DPPO by hand, and against slow float64 loops with their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from rlhf_forward.masking import mask_from_lengths
from rlhf_objective import FunctionUse, PolicyLoss, PolicyLossInput

LENGTHS = [2, 3, 1, 4, 0]
Row = Sequence[float]


def loss_of(name: str, options: Mapping[str, Any], batch: PolicyLossInput) -> PolicyLoss:
    found: PolicyLoss = FunctionUse("policy_losses", {"name": name, **options}).bind(where="test")(batch)
    return found


def one_row(new: Row, old: Row, advantages: Row) -> PolicyLossInput:
    rows = [torch.tensor([row], dtype=torch.float32) for row in (new, old, advantages)]
    return PolicyLossInput(rows[0].requires_grad_(), rows[1], rows[2], torch.ones(1, len(new), dtype=torch.bool))


def drawn(seed: int, distance: float) -> PolicyLossInput:
    """One advantage a row: what the sequence losses are defined for."""
    generator = torch.Generator().manual_seed(seed)
    mask = mask_from_lengths(torch.tensor(LENGTHS), 4)
    old = -torch.rand(5, 4, generator=generator) * 2 - 0.02
    new = (old + (torch.rand(5, 4, generator=generator) - 0.5) * 2 * distance).clamp(max=-0.01)
    advantages = torch.randn(5, 1, generator=generator).expand(5, 4)
    return PolicyLossInput(new.requires_grad_(), old, advantages, mask)


def sapo(new: Row, old: Row, advantage: float, tau_positive: float = 1.0, tau_negative: float = 1.05) -> list[float]:
    tau = tau_positive if advantage > 0 else tau_negative
    ratios = [math.exp(n - o) for n, o in zip(new, old, strict=True)]
    return [-(4 / tau) / (1 + math.exp(-tau * (ratio - 1))) * advantage for ratio in ratios]


def gmpo(
    new: Row, old: Row, advantage: float, clip_eps: float = 0.4, clip_eps_high: float | None = None
) -> list[float]:
    """The paper's product, once for each token: its mean over them is the sequence's own."""
    high = clip_eps if clip_eps_high is None else clip_eps_high
    sign = 1.0 if advantage > 0 else -1.0
    product = 1.0
    for n, o in zip(new, old, strict=True):
        ratio = math.exp(n - o)
        clipped = min(max(ratio, math.exp(-clip_eps)), math.exp(high))
        product *= min(ratio**sign, clipped**sign) ** sign
    return [-(product ** (1 / max(len(new), 1))) * advantage] * len(new)


def dppo(
    new: Row,
    old: Row,
    advantage: float,
    divergence: str = "tv",
    clip_eps: float = 0.2,
    clip_eps_high: float | None = None,
) -> list[float]:
    """Differentiated with the weight held: the ratio at `HELD`."""
    high = clip_eps if clip_eps_high is None else clip_eps_high
    found = []
    for n, o, held in zip(new, old, HELD, strict=True):
        p, q = math.exp(held), math.exp(o)
        if divergence == "tv":
            far = abs(p - q)
        else:
            far = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
        stopped = (advantage > 0 and p > q and far > high) or (advantage < 0 and p < q and far > clip_eps)
        found.append(0.0 if stopped else -min(math.exp(held - o), 20.0) * advantage * n)
    return found


HELD: list[float] = []
REFERENCES: dict[str, Callable[..., list[float]]] = {"sapo": sapo, "gmpo": gmpo, "dppo": dppo}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("sapo", {}),
    ("sapo", {"tau_positive": 2.0, "tau_negative": 0.5}),
    ("gmpo", {}),
    ("gmpo", {"clip_eps": 0.05, "clip_eps_high": 0.2}),
    ("dppo", {"clip_eps": 0.05}),
    ("dppo", {"clip_eps": 0.02, "clip_eps_high": 0.2}),
    ("dppo", {"divergence": "kl", "clip_eps": 0.01, "clip_eps_high": 0.03}),
]


@pytest.mark.parametrize("distance", [0.1, 1.0])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_agrees_with_a_slow_reference(name: str, options: dict[str, Any], distance: float) -> None:
    batch = drawn(3, distance)
    found = loss_of(name, options, batch)
    gradient = torch.autograd.grad(found.losses.sum(), batch.log_probs)[0]
    reference, moved = REFERENCES[name], 1e-6
    for row, length in enumerate(LENGTHS):
        new, old = ([float(x) for x in each[row, :length]] for each in (batch.log_probs.detach(), batch.old_log_probs))
        advantage = float(batch.advantages[row, 0])
        HELD[:] = new
        expected = reference(new, old, advantage, **options)
        assert found.losses[row, :length].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert not found.losses[row, length:].any()
        for t in range(length):
            up, down = ([*new[:t], new[t] + sign * moved, *new[t + 1 :]] for sign in (1, -1))
            rise = sum(reference(up, old, advantage, **options)) - sum(reference(down, old, advantage, **options))
            assert float(gradient[row, t]) == pytest.approx(rise / (2 * moved), rel=1e-3, abs=1e-5)


def test_sapo_by_hand() -> None:
    """At ratio 1 the gate is (4 / tau) / 2; at ratio 3 with tau 1 it is 4 / (1 + e^-2)."""
    batch = one_row([-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0 - math.log(3.0)], [1.0, -1.0, 0.5])
    expected = [-2.0, 2.0 / 1.05, -2.0 / (1 + math.exp(-2.0))]
    assert loss_of("sapo", {}, batch).losses[0].tolist() == pytest.approx(expected)


def test_gmpo_by_hand() -> None:
    """Log-ratios 0.1 and 0.9, the second cut to 0.4: the mean is 0.25; with A < 0 it is not cut: 0.5."""
    batch = one_row([-1.0, -1.0], [-1.1, -1.9], [2.0, 2.0])
    found = loss_of("gmpo", {}, batch)
    assert found.losses[0].tolist() == pytest.approx([-2.0 * math.exp(0.25)] * 2)
    assert found.clipped[0].tolist() == [False, True]
    assert found.ratio[0].tolist() == pytest.approx([math.exp(0.25)] * 2)
    worse = loss_of("gmpo", {}, one_row([-1.0, -1.0], [-1.1, -1.9], [-2.0, -2.0]))
    assert worse.losses[0].tolist() == pytest.approx([2.0 * math.exp(0.5)] * 2)
    assert not worse.clipped.any()


def test_dppo_by_hand() -> None:
    """From 0.1 to 0.2: a ratio of 2, but a distance of 0.1; from 0.5 to 0.8: a ratio of 1.6, and a distance of 0.3."""
    old, new = [math.log(0.1), math.log(0.5), math.log(0.5)], [math.log(0.2), math.log(0.8), math.log(0.8)]
    found = loss_of("dppo", {}, one_row(new, old, [1.0, 1.0, -1.0]))
    assert found.clipped[0].tolist() == [False, True, False], "the last one moved against its advantage"
    assert found.losses[0].tolist() == pytest.approx([-2.0 * math.log(0.2), 0.0, 1.6 * math.log(0.8)])
    # KL of (0.5, 0.5) to (0.8, 0.2): 0.5 log(0.5 / 0.8) + 0.5 log(0.5 / 0.2) = 0.223
    kl = [
        loss_of("dppo", {"divergence": "kl", "clip_eps": bound}, one_row(new, old, [1.0] * 3)) for bound in (0.22, 0.23)
    ]
    assert [each.clipped[0].tolist() for each in kl] == [[False, True, True], [False, False, False]]


def test_the_weight_of_dppo_is_truncated() -> None:
    batch = one_row([math.log(0.15)], [math.log(0.001)], [1.0])
    assert loss_of("dppo", {}, batch).losses.item() == pytest.approx(-20.0 * math.log(0.15))
    assert loss_of("dppo", {"max_ratio": 500.0}, batch).losses.item() == pytest.approx(
        -150.0 * math.log(0.15), rel=1e-5
    )
