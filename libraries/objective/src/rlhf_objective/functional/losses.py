"""Losses of policies and critics, per token and not yet aggregated.

All tensors are [B, A] float32; `mask` is the action mask, and every output is 0 (or False) outside it. Inputs are
replaced under a False mask before any arithmetic, so that nothing there reaches a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from rlhf_core.algorithm import Mean
from rlhf_core.episode_view import single_rank
from rlhf_forward.logprobs import token_log_probs
from rlhf_forward.masking import Reduce, masked_mean, masked_sum

from .kl import clamp_log_ratio, kl_estimate

if TYPE_CHECKING:
    from rlhf_forward.forward import PolicyOutput

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
    """[B, A], importance weights multiplied in."""
    mask: Tensor
    """[B, A] bool, True = counts in the loss."""
    marked: Tensor | None = None
    """[B, A] bool, the tokens that the loss has chosen over the whole episode (`rlhf_objective.marks`); None for a
    loss that chooses none."""


@dataclass(frozen=True, slots=True)
class EpisodeTokens:
    """The tokens from which a policy loss chooses: those of the rows here, and sums over all of the episode's."""

    log_probs: Tensor
    """[R, A] nats of the policy before the first step; 0 outside the mask."""
    advantages: Tensor
    """[R, A] as the loss will be given them; 0 outside the mask."""
    mask: Tensor
    """[R, A] bool."""
    draws: Tensor
    """[R, A] float64 in (0, 1): noise that depends on the sample and the token only."""
    all_tokens: Callable[[Tensor], Tensor]
    """[R, A] -> [T] float64: the values at all True positions of the masks of all ranks, in one order. Collective."""


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Per-token losses to aggregate, and values to log."""

    losses: Tensor
    ratio: Tensor
    """Detached importance ratio policy / old policy."""
    clipped: Tensor
    """bool: the clip decided the loss, so this token adds no gradient."""
    dual_clipped: Tensor
    """bool: the dual clip decided the loss."""


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """Per-token losses to aggregate; `clipped` (bool) where the clipped error was the larger."""

    losses: Tensor
    clipped: Tensor


def importance_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor, level: RatioLevel = "token") -> Tensor:
    """exp(log_probs - old_log_probs), the log-ratio clamped to +-20; 1 outside the mask.

    `sequence` (GSPO, Zheng 2025, equations 7 and 14): the length-normalised ratio of the whole sequence as value,
    with each token's own gradient, which allows advantages that differ between tokens.
    """
    log_ratio = torch.where(mask, log_probs - old_log_probs, 0.0)
    if level == "sequence":
        mean = masked_mean(log_ratio, mask, dim=-1).unsqueeze(-1).detach()
        own = torch.where(mask, log_probs, 0.0)
        log_ratio = torch.where(mask, mean + own - own.detach(), 0.0)
    elif level != "token":
        raise ValueError(f"unknown ratio level {level!r}: token or sequence")
    return clamp_log_ratio(log_ratio).exp()


def ppo_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_eps_low: float,
    clip_eps_high: float,
    dual_clip: float | None = None,
    ratio_level: RatioLevel = "token",
) -> PolicyLoss:
    """-min(ratio A, clip(ratio, 1 - clip_eps_low, 1 + clip_eps_high) A) (Schulman 2017, equation 7).

    `dual_clip` = c > 1 (Ye 2020, equation 5) bounds the loss where A < 0: -max(min(...), c A).
    """
    if dual_clip is not None and dual_clip <= 1.0:
        raise ValueError(f"dual_clip must be > 1, got {dual_clip}")
    ratio = importance_ratio(log_probs, old_log_probs, mask, ratio_level)
    advantages = torch.where(mask, advantages, 0.0)
    free = -ratio * advantages
    bounded = -ratio.clamp(1.0 - clip_eps_low, 1.0 + clip_eps_high) * advantages
    losses = torch.maximum(free, bounded)
    clipped = bounded > free
    dual_clipped = torch.zeros_like(mask)
    if dual_clip is not None:
        ceiling = -dual_clip * advantages
        dual_clipped = (advantages < 0) & (losses > ceiling)
        losses = torch.where(dual_clipped, ceiling, losses)
    return PolicyLoss(torch.where(mask, losses, 0.0), ratio.detach(), clipped & mask, dual_clipped & mask)


def cispo_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_eps_low: float,
    clip_eps_high: float,
) -> PolicyLoss:
    """-stop_gradient(clip(ratio)) A log_prob (CISPO: MiniMax-M1 2025, equations 4 and 5).

    The weight is clipped, not the gradient: every token keeps contributing.
    """
    ratio = importance_ratio(log_probs, old_log_probs, mask).detach()
    weight = ratio.clamp(1.0 - clip_eps_low, 1.0 + clip_eps_high)
    losses = -weight * torch.where(mask, advantages, 0.0) * torch.where(mask, log_probs, 0.0)
    clipped = (weight != ratio) & mask
    return PolicyLoss(torch.where(mask, losses, 0.0), ratio, clipped, torch.zeros_like(mask))


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip_eps: float | None
) -> ValueLoss:
    """1/2 max((V - R)^2, (clip(V, V_old +- clip_eps) - R)^2); without the clip where `clip_eps` is None."""
    values, old_values, returns = (torch.where(mask, x, 0.0) for x in (values, old_values, returns))
    squares = (values - returns).square()
    if clip_eps is None:
        return ValueLoss(0.5 * squares, torch.zeros_like(mask))
    near_old = torch.maximum(torch.minimum(values, old_values + clip_eps), old_values - clip_eps)
    bounded = (near_old - returns).square()
    return ValueLoss(0.5 * torch.maximum(squares, bounded), (bounded > squares) & mask)


def effective_sample_size(weights: Tensor, mask: Tensor, all_reduce: Reduce = single_rank) -> Tensor:
    """(sum w)^2 / (n sum w^2) over the n True positions of all ranks: 1 for equal weights; 0 where nothing counts."""
    exact = torch.where(mask, weights, 0.0).double()
    total, squares, count = all_reduce(torch.stack([exact.sum(), exact.square().sum(), mask.sum().double()])).unbind()
    divisor = squares * count
    return torch.where(divisor > 0, total.square() / torch.where(divisor > 0, divisor, 1.0), 0.0).to(weights.dtype)


def masked_cross_entropy(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """-log p(label) per position: [B, T, V], [B, T] -> [B, T] float32 nats, 0 outside the mask.

    `logits[:, t]` predicts `labels[:, t]`: the caller has shifted them. Where the mask is False, labels may be
    anything (-100, say) and logits are never read.
    """
    losses = -token_log_probs(logits[mask], labels[mask])
    return torch.zeros(mask.shape, dtype=losses.dtype, device=losses.device).index_put((mask,), losses)


def policy_metrics(policy: PolicyLoss, output: PolicyOutput, old_log_probs: Tensor, mask: Tensor) -> dict[str, Mean]:
    """Metrics of a micro-batch, common to all policy losses: means over the True positions of `mask` ([B, A] bool).

    `policy/approx_kl` is the k3 estimate, in nats, of the policy's KL from the one that gave `old_log_probs`.
    """
    tokens = mask.sum()
    new = torch.where(mask, output.log_probs.detach(), 0.0)
    moved = kl_estimate(torch.where(mask, old_log_probs, 0.0), new, "k3")
    metrics: dict[str, Mean] = {
        "policy/clip_fraction": Mean(policy.clipped.sum(), tokens),
        "policy/ratio_mean": Mean(masked_sum(policy.ratio, mask), tokens),
        "policy/approx_kl": Mean(masked_sum(moved, mask), tokens),
    }
    if output.entropy is not None:
        metrics["policy/entropy"] = Mean(masked_sum(output.entropy.detach(), mask), tokens)
    return metrics
