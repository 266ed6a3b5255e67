"""Process reward models: a score at the end of each step of an answer, learnt from steps that are right or wrong."""

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
_HINT = 'each line needs {"prompt": …, "steps": ["…", …], "labels": [true, false, …]}'


class ProcessRewardModel(PolicyOnly[Example, ExampleBatch]):
    """Mean binary cross-entropy over the steps of the global batch (Lightman 2023, section 2.6)."""

    model_kind = "sequence-classification"
    config: ProcessRewardModelConfig

    def check_record(self, record: Mapping[str, Any]) -> None:
        """Raise `DataError` for a line without labelled steps, or with a step that has no text."""
        steps, labels = _list_of(str, record.get("steps")), _list_of(bool, record.get("labels"))
        if not steps or len(steps) != len(labels):
            raise DataError(
                "the record has no `steps` (texts) with as many `labels` (true or false)", where=_WHERE, hint=_HINT
            )
        if not all(step + self.config.step_separator for step in steps):
            raise DataError("a step of the record is empty", where=_WHERE, hint=_HINT)

    def encode(self, record: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> Example | None:
        """`prompt` (text or chat messages), `steps` (texts) and `labels` (true: the step is right)."""
        self.check_record(record)
        ids = list(PromptEncoder(tokenizer).prompt(record, 0, _WHERE).prompt_ids)
        mask, right = [False] * len(ids), [False] * len(ids)
        for step, label in zip(record["steps"], record["labels"], strict=True):
            own = list(tokenizer(step + self.config.step_separator, add_special_tokens=False)["input_ids"])
            if not own:
                raise DataError("a step of the record is empty", where=_WHERE, hint=_HINT)
            ids += own
            mask += [False] * (len(own) - 1) + [True]
            right += [label] * len(own)
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
        says_right = scores.detach() > 0
        number, wrong = right.numel(), ~right
        return LossOutput(
            {"policy": losses},
            {
                "step/accuracy": Mean((says_right == right).sum(), number),
                "step/wrong_found": Mean((~says_right & wrong).sum(), wrong.sum()),
                "step/right_fraction": Mean(right.sum(), number),
            },
        )


def _list_of(kind: type[ValueT], values: Any) -> list[ValueT]:
    """Empty where the values are none of that kind."""
    is_list = isinstance(values, list | tuple) and all(isinstance(each, kind) for each in values)
    return list(values) if is_list else []


def token_scores(model: nn.Module, input_ids: Tensor, mask: Tensor) -> Tensor:
    """[B, S] float32: the head's score at each token. The model is called as a whole, so that its wrappers take part.

    transformers computes the head at all tokens and gives that of the last; the others are taken at the head.
    """
    head: Any = innermost(model).score
    seen: list[Tensor] = []
    handle = head.register_forward_hook(lambda module, inputs, output: seen.append(output))
    try:
        with own_lengths(model, mask.sum(1, keepdim=True)):
            output: Any = model(input_ids=input_ids, attention_mask=mask.long(), use_cache=False)
    finally:
        handle.remove()
    scores: Tensor = seen[-1].squeeze(-1).float()
    # The model's own output has to be part of the graph: sharded models gather their weights when its gradient comes.
    unread: Tensor = 0.0 * output.logits.float().sum()
    return scores + unread
