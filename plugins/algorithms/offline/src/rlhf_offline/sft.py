"""Supervised fine-tuning: cross-entropy on answers, none on prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from rlhf_core.algorithm import LossOutput, Mean
from rlhf_core.components import AlgorithmContext
from rlhf_core.errors import DataError
from rlhf_forward import masked_sum
from rlhf_objective import masked_cross_entropy

from .chat import conversation_example
from .config import SFTConfig
from .examples import Example, ExampleBatch, answer_example, collate_examples, target_logits
from .packing import plan_rows
from .policy_only import PolicyOnly


def build(config: SFTConfig, context: AlgorithmContext) -> SFT:
    """SFT under its options."""
    return SFT(config)


class SFT(PolicyOnly[Example, ExampleBatch]):
    """Mean cross-entropy over the learnt tokens of the global batch, in nats."""

    def __init__(self, config: SFTConfig) -> None:
        self._config = config

    def check_record(self, record: Mapping[str, Any]) -> None:
        completion = record.get("completion")
        if (isinstance(completion, str) and completion) or (
            completion is None and isinstance(record.get("messages"), list | tuple)
        ):
            return
        raise DataError(
            f"the record has no completion text (its keys: {', '.join(sorted(record))})",
            where="sft",
            hint='each line needs {"prompt": …, "completion": "…"} or {"messages": […]}',
        )

    def encode(self, record: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> Example | None:
        """`prompt` (text or chat messages) and `completion` (text), or `messages` (a whole conversation)."""
        self.check_record(record)
        if record.get("completion") is None:
            example = conversation_example(record["messages"], tokenizer, turns=self._config.turns)
        else:
            example = answer_example(record, record["completion"], tokenizer, add_eos=self._config.add_eos, where="sft")
        return example if example.num_tokens <= self._config.max_tokens else None

    def collate(self, items: Sequence[Example]) -> ExampleBatch:
        if not self._config.packing:
            return collate_examples(items)
        rows = plan_rows([item.num_tokens for item in items], self._config.max_tokens)
        return pack([[items[index] for index in row] for row in rows])

    def counts(self, batch: ExampleBatch) -> Mapping[str, float]:
        return {"policy": float(batch.target_mask.sum())}

    def loss(self, models: Mapping[str, nn.Module], batch: ExampleBatch) -> LossOutput:
        logits, mask = target_logits(models["policy"], batch), batch.target_mask
        losses = masked_cross_entropy(logits, batch.targets, mask)
        with torch.no_grad():
            right = (logits.argmax(-1) == batch.targets) & mask
        return LossOutput({"policy": masked_sum(losses, mask)}, {"sft/token_accuracy": Mean(right.sum(), mask.sum())})


def pack(rows: Sequence[Sequence[Example]]) -> ExampleBatch:
    """Concatenate each row's examples; the first token of each is never learnt."""
    joined, positions = [], []
    for row in rows:
        masks = [each.loss_mask.clone() for each in row]
        for mask in masks:
            mask[0] = False
        joined.append(Example(torch.cat([each.input_ids for each in row]), torch.cat(masks)))
        positions.append(torch.cat([torch.arange(each.num_tokens) for each in row]))
    batch = collate_examples(joined)
    return ExampleBatch(
        batch.input_ids,
        batch.attention_mask,
        batch.loss_mask,
        torch.nn.utils.rnn.pad_sequence(positions, batch_first=True),
        num_packed=sum(len(row) for row in rows),
    )
