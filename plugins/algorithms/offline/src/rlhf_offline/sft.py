"""Supervised fine-tuning: cross-entropy on answers, not on prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from rlhf_core.algorithm import LossOutput, Mean
from rlhf_core.errors import DataError
from rlhf_forward import token_log_probs, token_logits

from .chat import conversation_example
from .config import SFTConfig
from .examples import Example, ExampleBatch, answer_example, collate_examples, target_logits
from .policy_only import PolicyOnly


class SFT(PolicyOnly[Example, ExampleBatch]):
    """Mean cross-entropy over the trained tokens of the global batch, in nats."""

    config: SFTConfig

    def check_record(self, record: Mapping[str, Any]) -> None:
        completion = record.get("completion")
        if (isinstance(completion, str) and completion) or (
            completion is None and isinstance(record.get("messages"), list | tuple)
        ):
            return
        raise DataError(
            f"the record lacks a completion text (its keys: {', '.join(sorted(record))})",
            where="sft",
            hint='write lines with {"prompt": …, "completion": "…"} or {"messages": […]}',
        )

    def encode(self, record: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> Example | None:
        """Encode `prompt` (text or chat messages) and `completion` (text), or `messages` (a whole conversation)."""
        self.check_record(record)
        if record.get("completion") is None:
            if record.get("images"):
                raise DataError(
                    "the record is a conversation with images, which is not supported",
                    where="sft",
                    hint='write its last answer as {"prompt": [messages before it], "completion": "…"}',
                )
            example = conversation_example(record["messages"], tokenizer, turns=self.config.turns)
        else:
            add_eos, kind = self.config.add_eos, self.kind
            example = answer_example(record, record["completion"], tokenizer, add_eos=add_eos, where="sft", kind=kind)
        return example if example.num_tokens <= self.config.max_tokens else None

    def collate(self, items: Sequence[Example]) -> ExampleBatch:
        return collate_examples(items)

    def counts(self, batch: ExampleBatch) -> Mapping[str, float]:
        return {"policy": float(batch.target_mask.sum())}

    def loss(self, models: Mapping[str, nn.Module], batch: ExampleBatch) -> LossOutput:
        policy, mask = models["policy"], batch.target_mask
        if self.config.packing:
            is_read = torch.nn.functional.pad(mask, (0, 1))
            inputs = batch.columns.model_inputs
            logits = token_logits(policy, batch.input_ids, batch.attention_mask, is_read, columns=inputs)
        else:
            logits = target_logits(policy, batch)[mask]
        labels = batch.targets[mask]
        with torch.no_grad():
            correct = (logits.argmax(-1) == labels).sum()
        losses = -token_log_probs(logits, labels)
        total = losses.sum(dtype=torch.float64).to(losses.dtype)
        return LossOutput({"policy": total}, {"sft/token_accuracy": Mean(correct, mask.sum())})
