"""SimPO: an answer's reward is its mean log-prob per token, without a reference."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf_objective import PairLoss

from .answers import AnswersBatch
from .config import SimPOConfig
from .pairs import PairAlgorithm


def simpo_loss(chosen_log_probs: Tensor, rejected_log_probs: Tensor, *, beta: float, gamma: float) -> PairLoss:
    """-log sigmoid(beta (c - r) - gamma) of mean log-probs per token c and r, [B] nats (Meng 2024, equation 6)."""
    chosen, rejected = beta * chosen_log_probs.float(), beta * rejected_log_probs.float()
    return PairLoss(-logsigmoid(chosen - rejected - gamma), chosen.detach(), rejected.detach())


class SimPO(PairAlgorithm):
    """Mean loss over the pairs of the global batch."""

    name = "simpo"
    config: SimPOConfig
    per_token = True

    def pair_loss(self, chosen: Tensor, rejected: Tensor, batch: AnswersBatch) -> PairLoss:
        return simpo_loss(chosen, rejected, beta=self.config.beta, gamma=self.config.gamma)
