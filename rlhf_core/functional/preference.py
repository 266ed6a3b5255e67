"""Losses on preference pairs: a chosen and a rejected answer.

Everything is [B] float32, one entry per pair, not yet aggregated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

DPOKind = Literal["sigmoid", "ipo", "hinge"]
"""Loss of a preference margin: DPO's (Rafailov 2023), IPO's square (Azar 2024), SLiC's hinge (Zhao 2023)."""


@dataclass(frozen=True, slots=True)
class PairLoss:
    """Per-pair losses and rewards of a batch."""

    losses: Tensor
    chosen_rewards: Tensor
    """Detached scores (Bradley-Terry) or implicit rewards (DPO)."""
    rejected_rewards: Tensor

    @property
    def margins(self) -> Tensor:
        return self.chosen_rewards - self.rejected_rewards

    @property
    def is_right(self) -> Tensor:
        """[B] bool: the model prefers the chosen answer; a tie counts as wrong."""
        return self.chosen_rewards > self.rejected_rewards


def bradley_terry_loss(
    chosen_scores: Tensor,
    rejected_scores: Tensor,
    *,
    margin: Tensor | float = 0.0,
    centring_coef: float = 0.0,
) -> PairLoss:
    """-log sigmoid(chosen - rejected - margin) + centring_coef (chosen + rejected)^2.

    Margin: Touvron 2023 (Llama 2), equation 2. Centring keeps scores near zero: Eisenstein 2023, equation 2.
    """
    chosen, rejected = chosen_scores.float(), rejected_scores.float()
    losses = -logsigmoid(chosen - rejected - margin)
    if centring_coef:
        losses = losses + centring_coef * (chosen + rejected).square()
    return PairLoss(losses, chosen.detach(), rejected.detach())


def dpo_loss(
    chosen_log_probs: Tensor,
    rejected_log_probs: Tensor,
    reference_chosen_log_probs: Tensor | None,
    reference_rejected_log_probs: Tensor | None,
    *,
    beta: float,
    kind: DPOKind = "sigmoid",
    label_smoothing: float = 0.0,
) -> PairLoss:
    """Direct preference optimisation on log-probs of whole answers (nats; for `ipo`, means over their tokens).

    With h = (chosen - reference chosen) - (rejected - reference rejected): `sigmoid` -log sigmoid(beta h) (Rafailov
    2023), smoothed as in conservative DPO (Mitchell 2023); `ipo` (h - 1 / (2 beta))^2 (Azar 2023); `hinge`
    max(0, 1 - beta h) (SLiC, Zhao 2023). Without references (both None), h uses the policy alone.
    """
    if (reference_chosen_log_probs is None) != (reference_rejected_log_probs is None):
        raise ValueError("give the reference's log-probs of both answers, or of neither")
    if not 0.0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing must be in [0, 0.5), got {label_smoothing}")
    if label_smoothing and kind != "sigmoid":
        raise ValueError(f"label_smoothing is for kind 'sigmoid', not {kind!r}")
    chosen, rejected = chosen_log_probs.float(), rejected_log_probs.float()
    if reference_chosen_log_probs is not None and reference_rejected_log_probs is not None:
        chosen = chosen - reference_chosen_log_probs.detach().float()
        rejected = rejected - reference_rejected_log_probs.detach().float()
    difference = chosen - rejected
    if kind == "sigmoid":
        logits = beta * difference
        losses = -(1.0 - label_smoothing) * logsigmoid(logits) - label_smoothing * logsigmoid(-logits)
    elif kind == "ipo":
        losses = (difference - 1.0 / (2.0 * beta)).square()
    elif kind == "hinge":
        losses = torch.relu(1.0 - beta * difference)
    else:
        raise ValueError(f"unknown kind {kind!r}: sigmoid, ipo or hinge")
    return PairLoss(losses, beta * chosen.detach(), beta * rejected.detach())
