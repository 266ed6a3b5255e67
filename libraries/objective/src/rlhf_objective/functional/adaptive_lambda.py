"""A lambda of GAE that depends on the length of each answer."""

from __future__ import annotations

import torch  # noqa: F401 - for the example
from torch import Tensor


def adaptive_lambda(lengths: Tensor, alpha: float) -> Tensor:
    """Return max(0, 1 - 1 / (alpha length)): a lambda whose coefficients sum to alpha length (VAPO: Yue 2025).

    Args:
        lengths: [B] int, number of sampled tokens of each row.
        alpha: > 0.

    Returns:
        [B] float64, 0 for rows without tokens.

    Example:
        >>> adaptive_lambda(torch.tensor([10, 40, 200]), alpha=0.05)
        tensor([0.0000, 0.5000, 0.9000], dtype=torch.float64)
    """
    return (1.0 - 1.0 / (alpha * lengths.double()).clamp(min=1e-9)).clamp(min=0.0)
