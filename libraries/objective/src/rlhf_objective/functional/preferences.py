"""Losses of preference pairs, as functions of a pair's log-ratios to the reference.

x and y are the log-ratios log π/π_ref of the chosen and the rejected answer, and h = g(x) - g(y) the difference of
their scores under a divergence (`score`), in nats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf_core.algorithm import Mean
from rlhf_forward.masking import masked_sum

from .kl import clamp_log_ratio

DPOKind = Literal["sigmoid", "ipo", "hinge", "robust", "nca", "apo-zero", "apo-down"]
Divergence = Literal["reverse-kl", "forward-kl", "jsd", "alpha"]


@dataclass(frozen=True, slots=True)
class PairLoss:
    """Losses and rewards of a batch of pairs, not yet aggregated, [B] float32 each."""

    losses: Tensor
    chosen_rewards: Tensor
    """Detached scores (reward models), implicit rewards (DPO), or log-probs per token (ORPO, SimPO)."""
    rejected_rewards: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """Other values of the pairs, [B] each, by the name of their mean."""


def sum_of_pairs(pairs: PairLoss, counts: Tensor) -> tuple[Tensor, dict[str, Mean]]:
    """Sum the losses of the pairs that count.

    Args:
        pairs: Losses and rewards of B pairs.
        counts: [B] bool, False for fillers.

    Returns:
        The sum (scalar), and the metrics `preference/…`.
    """
    means = {
        "margin": pairs.chosen_rewards - pairs.rejected_rewards,
        "chosen_reward": pairs.chosen_rewards,
        "rejected_reward": pairs.rejected_rewards,
        **pairs.metrics,
    }
    is_right, number = pairs.chosen_rewards > pairs.rejected_rewards, counts.sum()  # a tie counts as wrong
    metrics = {"preference/accuracy": Mean((is_right & counts).sum(), number)}
    metrics |= {f"preference/{name}": Mean(masked_sum(each, counts), number) for name, each in means.items()}
    return masked_sum(pairs.losses, counts), metrics


def score(log_ratio: Tensor, divergence: Divergence, alpha: float) -> Tensor:
    """f'(u) of u = π/π_ref, up to a constant, for the f-divergence that regularizes the policy (Wang 2023, table 1).

    - reverse-kl: log u
    - forward-kl: -1/u
    - jsd: log(u / (1 + u))
    - alpha: (1 - u^-alpha) / alpha with 0 < alpha < 1, between the two KLs

    All increase with u, so none changes which answer is preferred.
    """
    if divergence == "reverse-kl":
        return log_ratio
    if divergence == "jsd":
        return logsigmoid(log_ratio)
    bounded = clamp_log_ratio(log_ratio)
    if divergence == "forward-kl":
        return -torch.exp(-bounded)
    return -torch.expm1(-alpha * bounded) / alpha


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    *,
    beta: float,
    kind: DPOKind = "sigmoid",
    label_smoothing: float = 0.0,
    divergence: Divergence = "reverse-kl",
    alpha: float = 0.5,
) -> PairLoss:
    """Compute losses from the log-ratios of whole answers to the reference, by the table in the docs.

    The caller checks combinations of options.

    Args:
        chosen, rejected: [B] log-ratios in nats, for `ipo` of means over tokens. Without a reference, the policy's
            log-probs.
        beta: Strength of the regularization toward the reference.
        kind: Name of the loss.
        label_smoothing: Assumed share of wrong labels.
        divergence: Divergence from the reference, see `score`.
        alpha: Parameter of divergence `alpha`.

    Returns:
        Losses and implicit rewards, [B] each.

    Example:
        >>> import torch
        >>> pair = dpo_loss(torch.tensor([1.0]), torch.tensor([-1.0]), beta=0.5)
        >>> pair.losses, pair.chosen_rewards
        (tensor([0.3133]), tensor([0.5000]))
    """
    chosen, rejected = chosen.float(), rejected.float()
    scores = score(chosen, divergence, alpha), score(rejected, divergence, alpha)
    losses = _LOSSES[kind](*scores, beta, label_smoothing)
    return PairLoss(losses, beta * chosen.detach(), beta * rejected.detach())


def _sigmoid(x: Tensor, y: Tensor, beta: float, smoothing: float) -> Tensor:
    """Compute DPO losses [B] from the scores [B] of the chosen answers (x) and the rejected answers (y).

    Rafailov 2023, equation 7, with label smoothing as in conservative DPO (Mitchell 2023).
    """
    logits = beta * (x - y)
    return -(1.0 - smoothing) * logsigmoid(logits) - smoothing * logsigmoid(-logits)


def _robust(x: Tensor, y: Tensor, beta: float, smoothing: float) -> Tensor:
    """Chowdhury 2024 (robust DPO): unbiased if a share `smoothing` of the labels was flipped at random."""
    logits = beta * (x - y)
    return (smoothing * logsigmoid(-logits) - (1.0 - smoothing) * logsigmoid(logits)) / (1.0 - 2.0 * smoothing)


def _ipo(x: Tensor, y: Tensor, beta: float, smoothing: float) -> Tensor:
    """Azar 2023, equation 17."""
    return (x - y - 1.0 / (2.0 * beta)).square()


def _hinge(x: Tensor, y: Tensor, beta: float, smoothing: float) -> Tensor:
    """SLiC (Zhao 2023) on the log-ratios, as in Liu 2023 (RSO)."""
    return torch.relu(1.0 - beta * (x - y))


def _nca(x: Tensor, y: Tensor, beta: float, smoothing: float) -> Tensor:
    """Chen 2024 (noise contrastive alignment) for pairs: keeps the chosen answer's likelihood from falling."""
    return -logsigmoid(beta * x) - 0.5 * logsigmoid(-beta * x) - 0.5 * logsigmoid(-beta * y)


def _apo_zero(x: Tensor, y: Tensor, beta: float, smoothing: float) -> Tensor:
    """D'Oosterlinck 2024, equation 7, for answers better than the model's: raise the chosen, lower the rejected."""
    return torch.sigmoid(-beta * x) + torch.sigmoid(beta * y)


def _apo_down(x: Tensor, y: Tensor, beta: float, smoothing: float) -> Tensor:
    """D'Oosterlinck 2024, equation 8, for answers worse than the model's: lower both, the rejected more."""
    return torch.sigmoid(beta * x) + torch.sigmoid(-beta * (x - y))


_LOSSES: Mapping[DPOKind, Callable[[Tensor, Tensor, float, float], Tensor]] = {
    "sigmoid": _sigmoid,
    "ipo": _ipo,
    "hinge": _hinge,
    "robust": _robust,
    "nca": _nca,
    "apo-zero": _apo_zero,
    "apo-down": _apo_down,
}
