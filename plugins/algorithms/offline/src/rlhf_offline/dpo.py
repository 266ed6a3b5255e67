"""DPO: learn from pairs directly, with the policy's own log-probs as the reward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from rlhf_core.algorithm import LossOutput
from rlhf_core.components import AlgorithmContext
from rlhf_core.types import Role

from .answers import Answers, AnswersBatch, KnownReference
from .config import DPOConfig
from .dpo_losses import dpo_loss
from .pairs import PairAlgorithm, pair_log_probs, pair_output


def build(config: DPOConfig, context: AlgorithmContext) -> DPO:
    """DPO under its options."""
    return DPO(config)


class DPO(PairAlgorithm):
    """Mean preference loss over the pairs of the global batch."""

    def __init__(self, config: DPOConfig) -> None:
        super().__init__("dpo", max_tokens=config.max_tokens, add_eos=config.add_eos)
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
        return torch.stack(self._log_probs(model, batch), dim=-1)

    def loss(self, models: Mapping[str, nn.Module], batch: AnswersBatch) -> LossOutput:
        chosen, rejected = self._log_probs(models["policy"], batch)
        reference = (None, None) if batch.reference is None else batch.pairs(batch.reference)
        config = self._config
        result = dpo_loss(
            chosen,
            rejected,
            *reference,
            beta=config.beta,
            kind=config.loss,
            label_smoothing=config.label_smoothing,
            divergence=config.divergence,
            alpha=config.alpha,
        )
        return pair_output(result, batch.counts)

    def _log_probs(self, model: nn.Module, batch: AnswersBatch) -> tuple[Tensor, Tensor]:
        return pair_log_probs(model, batch, mean=self._config.loss == "ipo")
