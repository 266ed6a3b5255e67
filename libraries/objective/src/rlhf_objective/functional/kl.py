"""KL penalty: estimators from samples of the policy, and a controller of its coefficient.

Estimators: Schulman 2020, "Approximating KL Divergence". Adaptive controller: Ziegler 2019, section 2.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3", "abs", "k1+", "k3+"]
"""Name of an estimator of `kl_estimate`: those of Schulman (2020), |d|, and two with the gradient of k2."""

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to plus or minus this before `exp` (e^20 = 4.9e8), so that no ratio overflows."""


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """Clamp a log-ratio to plus or minus `MAX_LOG_RATIO` for use in `exp`.

    Args:
        log_ratio: Log-ratios of any shape, in nats.

    Returns:
        A tensor of the same shape and dtype, with gradient 0 for clamped values.

    Example:
        >>> clamp_log_ratio(torch.tensor([-30.0, 0.5]))
        tensor([-20.0000,   0.5000])
    """
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def kl_estimate(log_probs: Tensor, reference_log_probs: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate KL(policy || reference) per token, from tokens that the policy sampled.

    With d = log_probs - reference_log_probs: k1 = d (unbiased, may be negative), k2 = d^2 / 2 (biased),
    k3 = exp(-d) - 1 + d (unbiased, never negative), abs = |d| (biased). d is clamped only for k3, and k3 itself is not
    clamped above. `k1+` and `k3+` have the values of k1 and k3 but (straight through) the gradient of k2, which is the
    gradient of the KL, unlike those of k1 and k3 (Tang & Munos 2025, "On a few pitfalls in KL divergence gradient
    estimation").

    Args:
        log_probs, reference_log_probs: Log-probs of the same tokens, of any shape, in nats.
        estimator: Name of the estimator.

    Returns:
        Nats, of the same shape.

    Raises:
        ValueError: The estimator is unknown.

    Example:
        >>> policy, reference = torch.tensor(0.5).log(), torch.tensor(0.25).log()  # d = log 2 = 0.6931
        >>> [round(float(kl_estimate(policy, reference, name)), 4) for name in ("k1", "k2", "k3")]
        [0.6931, 0.2402, 0.1931]
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
        # expm1 keeps the precision that exp(-d) - 1 loses near 0. Rounding errors below 0 are clamped.
        return (torch.expm1(-difference) + difference).clamp(min=0.0)
    if estimator == "abs":
        return difference.abs()
    raise ValueError(f"unknown KL estimator {estimator!r}: {', '.join(get_args(KLEstimator))}")


class KLController:
    """The KL coefficient of a run: constant, or adapted so that the KL per sample approaches a target.

    `update` multiplies an adaptive `value` by 1 + clip(kl / target - 1, -0.2, 0.2) * num_samples / horizon (Ziegler
    2019, equation 6).

    Example:
        >>> controller = KLController(0.1, target=6.0, horizon=10_000)
        >>> controller.update(kl=12.0, num_samples=1000)  # 0.1 * (1 + 0.2 * 1000 / 10000)
        >>> round(controller.value, 4)
        0.102
    """

    def __init__(self, value: float, *, target: float | None = None, horizon: float = 10_000) -> None:
        """Create a controller.

        Args:
            value: Initial coefficient.
            target: KL per sample in nats. None keeps the coefficient constant, set by the run file even after a resume.
            horizon: Number of samples over which the coefficient adapts.
        """
        if target is not None and (target <= 0 or horizon <= 0):
            raise ValueError(f"target and horizon must be > 0, got {target} and {horizon}")
        self.value = float(value)
        self._target = target
        self._horizon = horizon

    def update(self, kl: float, num_samples: int) -> None:
        """Adapt the coefficient. `kl`: mean over `num_samples` samples of the KL summed over a sample's tokens."""
        if self._target is not None:
            error = min(max(kl / self._target - 1.0, -0.2), 0.2)
            self.value *= 1.0 + error * num_samples / self._horizon

    def state_dict(self) -> dict[str, float]:
        return {} if self._target is None else {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        if set(state) != set(self.state_dict()):
            raise ValueError(f"this KL controller keeps {sorted(self.state_dict())}, got {sorted(state)}")
        self.value = float(state.get("value", self.value))
