"""Inputs and outputs of losses, importance ratios, and the effective sample size of weights.

All tensors are [B, A], and outputs are 0 (or False) outside the action mask, unless a docstring states otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rlhf_core.episode_view import single_rank
from rlhf_forward.masking import Reduce, masked_mean

from .kl import clamp_log_ratio

RatioLevel = Literal["token", "sequence"]
"""Level of an importance ratio: each token, or the geometric mean over its sequence (GSPO)."""


@dataclass(frozen=True, slots=True)
class PolicyLossInput:
    """Input of a named policy loss (`rlhf.policy_losses`)."""

    log_probs: Tensor
    """[B, A] nats of the policy, with gradient."""
    old_log_probs: Tensor
    """[B, A] nats before the first step on these samples."""
    advantages: Tensor
    """[B, A], multiplied by importance weights."""
    mask: Tensor
    """[B, A] bool, True = counts in the loss."""
    marked: Tensor | None = None
    """[B, A] bool, the tokens that the loss selected from the whole episode (`rlhf_objective.marks`). None for a loss
    without such a selection."""


@dataclass(frozen=True, slots=True)
class EpisodeTokens:
    """Tokens from which a policy loss selects: those of this rank's rows, and access to all of the episode."""

    log_probs: Tensor
    """[R, A] nats of the policy before the first step, 0 outside the mask."""
    advantages: Tensor
    """[R, A] as the loss will receive them, 0 outside the mask."""
    mask: Tensor
    """[R, A] bool."""
    draws: Tensor
    """[R, A] float64 in (0, 1): noise that depends only on the sample and the token."""
    all_tokens: Callable[[Tensor], Tensor]
    """[R, A] -> [T] float64: values at all True positions of all ranks' masks, in a fixed order. Collective."""


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Per-token losses to aggregate, and values to log."""

    losses: Tensor
    ratio: Tensor
    """Importance ratio policy / old policy, detached."""
    clipped: Tensor
    """bool: the clip determined the loss, so this token does not contribute a gradient."""
    dual_clipped: Tensor
    """bool: the dual clip determined the loss."""


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """Per-token losses to aggregate, and values to log."""

    losses: Tensor
    clipped: Tensor
    """bool: the clipped error was larger, and determined the loss."""


def importance_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor, level: RatioLevel = "token") -> Tensor:
    """exp(log_probs - old_log_probs), with the log-ratio clamped to +-20.

    The level `sequence` (GSPO, Zheng 2025, equations 7 and 14) has the length-normalized ratio of the sequence as its
    value and each token's own gradient, which allows advantages that differ between tokens.

    Args:
        log_probs, old_log_probs: [B, A] nats.
        mask: [B, A] bool.
        level: Ratio of each token or of its sequence.

    Returns:
        [B, A] float32, 1 outside the mask.

    Raises:
        ValueError: The level is unknown.

    Example:
        >>> new, old = torch.tensor([[0.6, 0.2]]).log(), torch.tensor([[0.4, 0.2]]).log()
        >>> mask = torch.tensor([[True, True]])
        >>> importance_ratio(new, old, mask), importance_ratio(new, old, mask, "sequence")  # 1.5, 1 and sqrt(1.5 * 1)
        (tensor([[1.5000, 1.0000]]), tensor([[1.2247, 1.2247]]))
    """
    log_ratio = torch.where(mask, log_probs - old_log_probs, 0.0)
    if level == "sequence":
        mean = masked_mean(log_ratio, mask, dim=-1).unsqueeze(-1).detach()
        own = torch.where(mask, log_probs, 0.0)
        log_ratio = torch.where(mask, mean + own - own.detach(), 0.0)
    elif level != "token":
        raise ValueError(f"unknown ratio level {level!r}: token or sequence")
    return clamp_log_ratio(log_ratio).exp()


def effective_sample_size(weights: Tensor, mask: Tensor, all_reduce: Reduce = single_rank) -> Tensor:
    """(sum w)^2 / (n sum w^2) over the n True positions of all ranks: 1 for equal weights.

    Args:
        weights: [B, A] float, w >= 0.
        mask: [B, A] bool.
        all_reduce: Sums over ranks. Collective.

    Returns:
        Scalar in (0, 1] in the dtype of `weights`, or 0 if no position counts or all weights are 0.

    Example:
        >>> effective_sample_size(torch.tensor([1.0, 3.0]), torch.tensor([True, True]))  # 4^2 / (2 * 10)
        tensor(0.8000)
    """
    exact = torch.where(mask, weights, 0.0).double()
    total, squares, count = all_reduce(torch.stack([exact.sum(), exact.square().sum(), mask.sum().double()])).unbind()
    divisor = squares * count
    return torch.where(divisor > 0, total.square() / torch.where(divisor > 0, divisor, 1.0), 0.0).to(weights.dtype)
