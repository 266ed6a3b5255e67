"""KL penalty: estimators from samples of the policy, and controllers of its coefficient.

Estimators: Schulman 2020, "Approximating KL Divergence". Adaptive controller: Ziegler 2019, section 2.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3", "abs", "k1+", "k3+"]
"""An estimator of `kl_estimate`: as Schulman (2020) numbers them, the distance, and two with the gradient of k2."""

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to plus or minus this before `exp` (e^20 = 4.9e8), so that no ratio overflows."""


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """The log-ratio clamped for use in `exp`."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def kl_estimate(log_probs: Tensor, reference_log_probs: Tensor, estimator: KLEstimator) -> Tensor:
    """Per-token estimate of KL(policy || reference) from tokens the policy sampled, any shape, in nats.

    With d = log_probs - reference_log_probs: k1 = d (unbiased, may be negative), k2 = d^2 / 2 (biased),
    k3 = exp(-d) - 1 + d (unbiased, never negative), abs = |d| (biased). d is clamped for k3 only, and k3 is not clamped
    above. `k1+` and `k3+` have the values of k1 and k3 and, straight through, the gradient of k2: that of the KL,
    which the gradients of k1 and k3 are not (Tang & Munos 2025, "On a few pitfalls in KL divergence gradient
    estimation").
    """
    if estimator in ("k1+", "k3+"):
        value = kl_estimate(log_probs, reference_log_probs, "k1" if estimator == "k1+" else "k3").detach()
        gradient = kl_estimate(log_probs, reference_log_probs, "k2")
        return value + (gradient - gradient.detach())
    difference = log_probs - reference_log_probs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference.square()
    if estimator == "k3":
        difference = clamp_log_ratio(difference)
        # expm1 keeps the precision that exp(-d) - 1 loses near 0; rounding below 0 is clamped.
        return (torch.expm1(-difference) + difference).clamp(min=0.0)
    if estimator == "abs":
        return difference.abs()
    raise ValueError(f"unknown KL estimator {estimator!r}: {', '.join(get_args(KLEstimator))}")


class KLController:
    """The KL coefficient of a run: constant, or steered so that the KL per sample approaches `target` (nats).

    After each update a steered `value` is multiplied by 1 + clip(kl / target - 1, -0.2, 0.2) * num_samples / horizon,
    with `horizon` in samples (Ziegler 2019, equation 6).
    """

    def __init__(self, value: float, *, target: float | None = None, horizon: float = 10_000) -> None:
        """target: None keeps the coefficient constant; the run file alone then sets it, also after a resume."""
        if target is not None and (target <= 0 or horizon <= 0):
            raise ValueError(f"target and horizon must be > 0, got {target} and {horizon}")
        self.value = float(value)
        self._target = target
        self._horizon = horizon

    def update(self, kl: float, num_samples: int) -> None:
        """`kl`: mean over samples of the KL summed over a sample's tokens, measured on `num_samples`."""
        if self._target is not None:
            error = min(max(kl / self._target - 1.0, -0.2), 0.2)
            self.value *= 1.0 + error * num_samples / self._horizon

    def state_dict(self) -> dict[str, float]:
        return {} if self._target is None else {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        if set(state) != set(self.state_dict()):
            raise ValueError(f"this KL controller keeps {sorted(self.state_dict())}, got {sorted(state)}")
        self.value = float(state.get("value", self.value))
