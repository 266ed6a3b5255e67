"""Process reward models: a score at the end of each step of an answer, trained on steps labeled right or wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import PreTrainedTokenizerBase

from rlhf_core.algorithm import LossOutput, Mean
from rlhf_core.errors import DataError
from rlhf_core.prompts import PromptEncoder
from rlhf_forward import innermost, own_lengths

from .config import ProcessRewardModelConfig
from .examples import Example, ExampleBatch, collate_examples
from .policy_only import PolicyOnly

ValueT = TypeVar("ValueT")
_WHERE = "process-reward-model"
_HINT = 'write lines with {"prompt": …, "steps": ["…", …], "labels": [true, false, …]}'


class ProcessRewardModel(PolicyOnly[Example, ExampleBatch]):
    """Mean binary cross-entropy over the steps of the global batch (Lightman 2023, section 2.6)."""

    model_kind = "sequence-classification"
    config: ProcessRewardModelConfig

    def check_record(self, record: Mapping[str, Any]) -> None:
        """Raise `DataError` if the line lacks labeled steps, or a step is empty."""
        steps, labels = _list_of(str, record.get("steps")), _list_of(bool, record.get("labels"))
        if not steps or len(steps) != len(labels):
            raise DataError(
                "the record needs `steps` (texts) and `labels` (true or false) for each", where=_WHERE, hint=_HINT
            )
        if not all(step + self.config.step_separator for step in steps):
            raise DataError("a step of the record is empty", where=_WHERE, hint=_HINT)

    def encode(self, record: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> Example | None:
        """Encode `prompt` (text or chat messages), `steps` (texts) and `labels` (true: the step is right)."""
        self.check_record(record)
        ids = list(PromptEncoder(tokenizer).prompt(record, 0, _WHERE).prompt_ids)
        mask, right = [False] * len(ids), [False] * len(ids)
        for step, label in zip(record["steps"], record["labels"], strict=True):
            step_ids = list(tokenizer(step + self.config.step_separator, add_special_tokens=False)["input_ids"])
            if not step_ids:
                raise DataError("a step of the record is empty", where=_WHERE, hint=_HINT)
            ids += step_ids
            mask += [False] * (len(step_ids) - 1) + [True]
            right += [label] * len(step_ids)
        if len(ids) > self.config.max_tokens:
            return None
        return Example(torch.tensor(ids, dtype=torch.int64), torch.tensor(mask), torch.tensor(right))

    def collate(self, items: Sequence[Example]) -> ExampleBatch:
        return collate_examples(items, pad_id=self._pad_id)

    def counts(self, batch: ExampleBatch) -> Mapping[str, float]:
        return {"policy": float(batch.loss_mask.sum())}

    def loss(self, models: Mapping[str, nn.Module], batch: ExampleBatch) -> LossOutput:
        assert batch.right is not None
        right = batch.right[batch.loss_mask]
        scores = token_scores(models["policy"], batch.input_ids, batch.attention_mask)[batch.loss_mask]
        losses = binary_cross_entropy_with_logits(scores, right.float(), reduction="sum")
        predicted = scores.detach() > 0
        number, wrong = right.numel(), ~right
        return LossOutput(
            {"policy": losses},
            {
                "step/accuracy": Mean((predicted == right).sum(), number),
                "step/wrong_found": Mean((~predicted & wrong).sum(), wrong.sum()),
                "step/right_fraction": Mean(right.sum(), number),
            },
        )


def _list_of(kind: type[ValueT], values: Any) -> list[ValueT]:
    """Return the values as a list, or an empty list if one is of another type."""
    is_list = isinstance(values, list | tuple) and all(isinstance(each, kind) for each in values)
    return list(values) if is_list else []


def token_scores(model: nn.Module, input_ids: Tensor, mask: Tensor) -> Tensor:
    """Score of the head at each token, [B, S] float32. Calls the whole model, so that its wrappers take effect.

    transformers applies the head at all tokens and returns the score of the last, so a hook on the head collects them.
    """
    head: Any = innermost(model).score
    outputs: list[Tensor] = []
    handle = head.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    try:
        with own_lengths(model, mask.sum(1, keepdim=True)):
            output: Any = model(input_ids=input_ids, attention_mask=mask.long(), use_cache=False)
    finally:
        handle.remove()
    scores: Tensor = outputs[-1].squeeze(-1).float()
    # Keep the model's own output in the graph: sharded models gather their weights in its backward hook.
    unread: Tensor = 0.0 * output.logits.float().sum()
    return scores + unread
