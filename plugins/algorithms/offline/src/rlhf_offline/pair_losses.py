"""Losses of preference pairs and of reward models. Everything is [B] float32, one entry per pair."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import logsigmoid


@dataclass(frozen=True, slots=True)
class PairLoss:
    """Losses and rewards of a batch, not yet aggregated."""

    losses: Tensor
    chosen_rewards: Tensor
    """Detached scores (reward models), implicit rewards (DPO), or log-probs per token (ORPO, SimPO)."""
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
