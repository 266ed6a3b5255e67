"""DPO: learn from pairs directly, with the policy's own log-probs as the reward."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from rlhf_core.components import AlgorithmContext
from rlhf_core.types import Role

from .answers import Answers, AnswersBatch, KnownReference
from .config import DPOConfig
from .dpo_losses import dpo_loss
from .pairs import PairAlgorithm, PairLoss


def build(config: DPOConfig, context: AlgorithmContext) -> DPO:
    """DPO under its options."""
    return DPO(config)


class DPO(PairAlgorithm):
    """Mean preference loss over the pairs of the global batch."""

    def __init__(self, config: DPOConfig) -> None:
        super().__init__("dpo", max_tokens=config.max_tokens, add_eos=config.add_eos)
        self.per_token = config.loss == "ipo"
        self._config = config
        self._known = KnownReference()

    @property
    def roles(self) -> frozenset[Role]:
        return frozenset({"policy"} if self._config.reference_free else {"policy", "reference"})

    def prepare_items(
        self, items: Sequence[Answers], reference: Callable[[Sequence[Answers]], Sequence[Tensor]]
    ) -> Sequence[Answers]:
        """Add the reference's log-probs of both answers; each pair is computed once and remembered."""
        if self._config.reference_free:
            return items
        return self._known.fill(items, reference)

    def reference_forward(self, model: nn.Module, batch: AnswersBatch) -> Tensor:
        """[B, 2] log-probs of chosen and rejected, in nats."""
        return torch.stack(batch.pairs(self.values(model, batch)), dim=-1)

    def pair_loss(self, chosen: Tensor, rejected: Tensor, batch: AnswersBatch) -> PairLoss:
        config = self._config
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
