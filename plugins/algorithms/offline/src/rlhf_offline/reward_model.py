"""Reward models: a score for each answer, trained on preference pairs (Bradley-Terry)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from transformers import PreTrainedTokenizerBase

from rlhf_core.errors import DataError
from rlhf_forward import own_lengths
from rlhf_objective import PairLoss

from .answers import Answers, AnswersBatch
from .config import RewardModelConfig
from .pairs import PairAlgorithm


def bradley_terry_loss(
    chosen_scores: Tensor,
    rejected_scores: Tensor,
    *,
    margin: Tensor | float = 0.0,
    centring_coef: float = 0.0,
) -> PairLoss:
    """-log sigmoid(chosen - rejected - margin) + centring_coef (chosen + rejected)^2, [B] each.

    Margin: Touvron 2023 (Llama 2), equation 2. The second term keeps scores near zero (Eisenstein 2023, equation 2).

    Example:
        >>> import torch
        >>> bradley_terry_loss(torch.tensor([1.0]), torch.tensor([0.0]), margin=1.0).losses
        tensor([0.6931])
    """
    chosen, rejected = chosen_scores.float(), rejected_scores.float()
    losses = -logsigmoid(chosen - rejected - margin)
    if centring_coef:
        losses = losses + centring_coef * (chosen + rejected).square()
    return PairLoss(losses, chosen.detach(), rejected.detach())


class RewardModel(PairAlgorithm):
    """Mean Bradley-Terry loss over the pairs of the global batch."""

    name = "reward-model"
    model_kind = "sequence-classification"
    config: RewardModelConfig

    def check_record(self, record: Mapping[str, Any]) -> None:
        super().check_record(record)
        margin = record.get("margin") if self.config.use_margin else 0.0
        if isinstance(margin, bool) or not isinstance(margin, int | float):
            problem = f"the record's `margin` must be a number, got {margin!r}"
            raise DataError(problem, where=self.name, hint="or set use_margin: false")

    def encode(self, record: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> Answers | None:
        """Encode a pair, with `use_margin` including its `margin` (number)."""
        pair = super().encode(record, tokenizer)
        return pair if pair is None or not self.config.use_margin else replace(pair, margin=float(record["margin"]))

    def values(self, model: nn.Module, batch: AnswersBatch) -> Tensor:
        """Score of each row's answer, [R] float32."""
        rows, mask = batch.examples, batch.examples.attention_mask
        with own_lengths(model, mask.sum(1, keepdim=True)):
            output = model(input_ids=rows.input_ids, attention_mask=mask.long(), use_cache=False)
        scores: Tensor = output.logits.squeeze(-1).float()
        return scores

    def pair_loss(self, chosen: Tensor, rejected: Tensor, batch: AnswersBatch) -> PairLoss:
        return bradley_terry_loss(chosen, rejected, margin=batch.margins, centring_coef=self.config.centring_coef)
