"""Supervised fine-tuning: cross-entropy on the completion's tokens, none on the prompt's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from rlhf_core.algorithm import DatasetAlgorithm, LossOutput, LossTerm, Mean
from rlhf_core.components import AlgorithmContext
from rlhf_core.errors import DataError
from rlhf_core.functional.forward import causal_lm_logits
from rlhf_core.functional.losses import masked_cross_entropy
from rlhf_core.functional.masking import masked_sum
from rlhf_core.prompts import PromptEncoder
from rlhf_core.types import Role

from .config import SFTConfig


def build(config: SFTConfig, context: AlgorithmContext) -> SFT:
    return SFT(config)


@dataclass(frozen=True, slots=True)
class SFTItem:
    """One example, unpadded."""

    input_ids: Tensor
    """[S] int64, prompt then completion."""
    loss_mask: Tensor
    """[S] bool, True = a token that is learnt."""

    @property
    def num_tokens(self) -> int:
        return int(self.input_ids.numel())


@dataclass(frozen=True, slots=True)
class SFTBatch:
    """Examples padded on the right."""

    input_ids: Tensor
    """[B, S] int64."""
    attention_mask: Tensor
    """[B, S] bool, True = a real token."""
    loss_mask: Tensor
    """[B, S] bool, True = a token that is learnt."""

    def __len__(self) -> int:
        return int(self.input_ids.shape[0])


class SFT(DatasetAlgorithm[SFTItem, SFTBatch]):
    """Mean cross-entropy over the learnt tokens of the global batch, in nats."""

    def __init__(self, config: SFTConfig) -> None:
        self._config = config

    @property
    def roles(self) -> frozenset[Role]:
        return frozenset({"policy"})

    @property
    def terms(self) -> Mapping[str, LossTerm]:
        return {"policy": LossTerm("policy")}

    def encode(self, record: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> SFTItem | None:
        """`prompt` (text or chat messages) and `completion` (text) to one example; None when it is too long."""
        completion = record.get("completion")
        if not isinstance(completion, str) or not completion:
            raise DataError(
                f"the record has no completion text (its keys: {', '.join(sorted(record))})",
                where="sft",
                hint='each line needs {"prompt": …, "completion": "…"}',
            )
        prompt_ids = list(PromptEncoder(tokenizer).prompt(record, 0, "sft").prompt_ids)
        answer_ids = tokenizer(completion, add_special_tokens=False)["input_ids"]
        if self._config.add_eos and tokenizer.eos_token_id is not None:
            answer_ids = [*answer_ids, tokenizer.eos_token_id]
        ids = torch.tensor(prompt_ids + answer_ids, dtype=torch.int64)
        if len(ids) > self._config.max_tokens:
            return None
        return SFTItem(ids, torch.arange(len(ids)) >= len(prompt_ids))

    def collate(self, items: Sequence[SFTItem]) -> SFTBatch:
        ids = pad_sequence([item.input_ids for item in items], batch_first=True)
        mask = pad_sequence([item.loss_mask for item in items], batch_first=True)
        lengths = torch.tensor([item.num_tokens for item in items])
        return SFTBatch(ids, torch.arange(ids.shape[1]) < lengths[:, None], mask)

    def to_device(self, batch: SFTBatch, device: torch.device) -> SFTBatch:
        return SFTBatch(batch.input_ids.to(device), batch.attention_mask.to(device), batch.loss_mask.to(device))

    def masked(self, item: SFTItem) -> SFTItem:
        return replace(item, loss_mask=torch.zeros_like(item.loss_mask))

    def counts(self, batch: SFTBatch) -> Mapping[str, float]:
        return {"policy": float(batch.loss_mask[:, 1:].sum())}

    def loss(self, models: Mapping[str, nn.Module], batch: SFTBatch) -> LossOutput:
        logits = causal_lm_logits(models["policy"], batch.input_ids, batch.attention_mask)[:, :-1]
        mask, labels = batch.loss_mask[:, 1:], batch.input_ids[:, 1:]
        losses = masked_cross_entropy(logits, labels, mask)
        with torch.no_grad():
            right = (logits.argmax(-1) == labels) & mask
        return LossOutput({"policy": masked_sum(losses, mask)}, {"sft/token_accuracy": Mean(right.sum(), mask.sum())})
