"""ORPO: supervised learning of the chosen answer plus an odds ratio that favors it over the rejected one."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf_objective import PairLoss

from .answers import AnswersBatch
from .config import ORPOConfig
from .pairs import PairAlgorithm

SUREST = -1e-6
"""Upper bound on a mean log-prob per token, since at 0 the odds would be infinite."""


def log_odds(log_probs: Tensor) -> Tensor:
    """log(p / (1 - p)) of p = exp(log_probs), any shape."""
    bounded = log_probs.clamp(max=SUREST)
    return bounded - torch.log(-torch.expm1(bounded))


def orpo_loss(chosen_log_probs: Tensor, rejected_log_probs: Tensor, *, odds_coef: float) -> PairLoss:
    """-c - odds_coef log sigmoid(log odds(c) - log odds(r)) of mean log-probs per token c and r, [B] nats.

    Hong 2024, equations 6 and 7. The likelihood of an answer is the mean per token.
    """
    chosen, rejected = chosen_log_probs.float(), rejected_log_probs.float()
    losses = -chosen - odds_coef * logsigmoid(log_odds(chosen) - log_odds(rejected))
    return PairLoss(losses, chosen.detach(), rejected.detach(), {"chosen_nll": -chosen.detach()})


class ORPO(PairAlgorithm):
    """Mean loss over the pairs of the global batch."""

    name = "orpo"
    config: ORPOConfig
    per_token = True

    def pair_loss(self, chosen: Tensor, rejected: Tensor, batch: AnswersBatch) -> PairLoss:
        return orpo_loss(chosen, rejected, odds_coef=self.config.odds_coef)
