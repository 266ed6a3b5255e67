"""Losses of policies and critics, per token and not yet aggregated.

All tensors are [B, A] float32. `mask` is the action mask, and every output is 0 (or False) outside it. Inputs are
replaced under a False mask before any arithmetic, so that their values never reach a gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlhf_core.algorithm import Mean
from rlhf_forward.logprobs import token_log_probs
from rlhf_forward.masking import masked_sum

from .kl import kl_estimate
from .loss_parts import PolicyLoss, RatioLevel, ValueLoss, importance_ratio

if TYPE_CHECKING:
    from rlhf_forward.forward import PolicyOutput


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

    Args:
        log_probs, old_log_probs: [B, A] nats, of the policy (with gradient) and before the first step.
        advantages: [B, A] float, A.
        mask: [B, A] bool.
        clip_eps_low, clip_eps_high: Bounds of the ratio below and above 1.
        dual_clip: c > 1 bounds the loss of tokens with A < 0 (Ye 2020, equation 5): -max(min(...), c A). None is off.
        ratio_level: Ratio of each token or of its sequence.

    Returns:
        Losses, ratio, and which clip determined each loss.

    Raises:
        ValueError: `dual_clip` is not above 1.

    Example:
        >>> new, old = torch.tensor([[0.6, 0.6]]).log(), torch.tensor([[0.4, 0.4]]).log()  # ratio 1.5
        >>> advantages, mask = torch.tensor([[1.0, -1.0]]), torch.tensor([[True, True]])
        >>> loss = ppo_policy_loss(new, old, advantages, mask, clip_eps_low=0.2, clip_eps_high=0.2)
        >>> loss.losses, loss.clipped  # -min(1.5, 1.2) and -min(-1.5, -1.2)
        (tensor([[-1.2000,  1.5000]]), tensor([[ True, False]]))
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

    The weight is clipped, not the gradient, so every token contributes.

    Args:
        log_probs, old_log_probs, advantages, mask, clip_eps_low, clip_eps_high: As for `ppo_policy_loss`.

    Returns:
        Losses, ratio (detached, before the clip), and which weights were clipped.
    """
    ratio = importance_ratio(log_probs, old_log_probs, mask).detach()
    weight = ratio.clamp(1.0 - clip_eps_low, 1.0 + clip_eps_high)
    losses = -weight * torch.where(mask, advantages, 0.0) * torch.where(mask, log_probs, 0.0)
    clipped = (weight != ratio) & mask
    return PolicyLoss(torch.where(mask, losses, 0.0), ratio, clipped, torch.zeros_like(mask))


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip_eps: float | None
) -> ValueLoss:
    """1/2 max((V - R)^2, (clip(V, V_old +- clip_eps) - R)^2).

    Args:
        values, old_values: [B, A] float, V (with gradient) and V before the first step.
        returns: [B, A] float, R.
        mask: [B, A] bool.
        clip_eps: Bound of the change of V. None does not clip.

    Returns:
        Losses, and which errors were clipped.

    Example:
        >>> one = torch.ones(1, 1)
        >>> value_loss(one, 0 * one, 2 * one, one > 0, clip_eps=0.5).losses  # max((1 - 2)^2, (0.5 - 2)^2) / 2
        tensor([[1.1250]])
    """
    values, old_values, returns = (torch.where(mask, x, 0.0) for x in (values, old_values, returns))
    squares = (values - returns).square()
    if clip_eps is None:
        return ValueLoss(0.5 * squares, torch.zeros_like(mask))
    near_old = torch.maximum(torch.minimum(values, old_values + clip_eps), old_values - clip_eps)
    bounded = (near_old - returns).square()
    return ValueLoss(0.5 * torch.maximum(squares, bounded), (bounded > squares) & mask)


def masked_cross_entropy(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Compute -log p(label) per position.

    Args:
        logits: [B, T, V] of any float dtype. `logits[:, t]` predicts `labels[:, t]`, so the caller must shift them.
        labels: [B, T] int64, any value (such as -100) under a False mask.
        mask: [B, T] bool.

    Returns:
        [B, T] float32 nats, 0 under a False mask.

    Example:
        >>> labels, mask = torch.tensor([[1, -100]]), torch.tensor([[True, False]])
        >>> masked_cross_entropy(torch.zeros(1, 2, 4), labels, mask)  # log 4
        tensor([[1.3863, 0.0000]])
    """
    losses = -token_log_probs(logits[mask], labels[mask])
    return torch.zeros(mask.shape, dtype=losses.dtype, device=losses.device).index_put((mask,), losses)


def policy_metrics(policy: PolicyLoss, output: PolicyOutput, old_log_probs: Tensor, mask: Tensor) -> dict[str, Mean]:
    """Compute metrics of a micro-batch that all policy losses share: means over the True positions of the mask.

    Args:
        policy: Result of the policy loss.
        output: Result of the policy's forward pass.
        old_log_probs: [B, A] nats, before the first step.
        mask: [B, A] bool.

    Returns:
        `policy/clip_fraction`, `policy/ratio_mean`, `policy/approx_kl` (the k3 estimate of KL(old policy || policy), in
        nats) and, if it was computed, `policy/entropy`.
    """
    tokens = mask.sum()
    new = torch.where(mask, output.log_probs.detach(), 0.0)
    kl = kl_estimate(torch.where(mask, old_log_probs, 0.0), new, "k3")
    metrics: dict[str, Mean] = {
        "policy/clip_fraction": Mean(policy.clipped.sum(), tokens),
        "policy/ratio_mean": Mean(masked_sum(policy.ratio, mask), tokens),
        "policy/approx_kl": Mean(masked_sum(kl, mask), tokens),
    }
    if output.entropy is not None:
        metrics["policy/entropy"] = Mean(masked_sum(output.entropy.detach(), mask), tokens)
    return metrics
