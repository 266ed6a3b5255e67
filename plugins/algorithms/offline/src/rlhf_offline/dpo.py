"""DPO: learn directly from pairs, with the policy's own log-probs as the reward."""

from __future__ import annotations

from torch import Tensor

from rlhf_core.components import AlgorithmContext
from rlhf_core.types import Role
from rlhf_objective import PairLoss, dpo_loss

from .answers import AnswersBatch
from .config import DPOConfig
from .pairs import PairAlgorithm


class DPO(PairAlgorithm):
    """Mean preference loss over the pairs of the global batch."""

    name = "dpo"
    config: DPOConfig

    def __init__(self, config: DPOConfig, context: AlgorithmContext) -> None:
        super().__init__(config, context)
        self.per_token = config.loss == "ipo"

    @property
    def roles(self) -> frozenset[Role]:
        return frozenset({"policy"} if self.config.reference_free else {"policy", "reference"})

    def pair_loss(self, chosen: Tensor, rejected: Tensor, batch: AnswersBatch) -> PairLoss:
        config = self.config
        if batch.reference is not None:
            reference_chosen, reference_rejected = batch.pairs(batch.reference.float())
            chosen, rejected = chosen - reference_chosen, rejected - reference_rejected
        return dpo_loss(
            chosen,
            rejected,
            beta=config.beta,
            kind=config.loss,
            label_smoothing=config.label_smoothing,
            divergence=config.divergence,
            alpha=config.alpha,
        )
