"""Process reward models: a score at the end of each step of an answer, learnt from steps that are right or wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import PreTrainedTokenizerBase

from rlhf_core.algorithm import LossOutput, Mean
from rlhf_core.components import AlgorithmContext
from rlhf_core.errors import DataError
from rlhf_core.prompts import PromptEncoder
from rlhf_forward import innermost, own_lengths

from .config import ProcessRewardModelConfig
from .examples import Example, ExampleBatch, collate_examples
from .policy_only import PolicyOnly
from .reward_model import set_pad_token

ValueT = TypeVar("ValueT")
_WHERE = "process-reward-model"
_HINT = 'each line needs {"prompt": …, "steps": ["…", …], "labels": [true, false, …]}'


@dataclass(frozen=True, slots=True)
class Steps:
    """One answer, unpadded."""

    example: Example
    """Its `loss_mask` is True at the last token of each step."""
    right: Tensor
    """[number of steps] bool."""

    @property
    def num_tokens(self) -> int:
        return self.example.num_tokens

    def masked(self) -> Steps:
        """The same with no step that counts."""
        return replace(self, example=self.example.masked(), right=self.right[:0])


@dataclass(frozen=True, slots=True)
class StepsBatch:
    """Answers, padded on the right."""

    examples: ExampleBatch
    right: Tensor
    """[N] bool, of the steps of all rows, row by row: the True positions of `examples.loss_mask`."""

    def __len__(self) -> int:
        return len(self.examples)


def build(config: ProcessRewardModelConfig, context: AlgorithmContext) -> ProcessRewardModel:
    """Make the algorithm; the tokenizer gets a pad token other than EOS, as for a reward model."""
    return ProcessRewardModel(config, pad_id=set_pad_token(context.tokenizer))


class ProcessRewardModel(PolicyOnly[Steps, StepsBatch]):
    """Mean binary cross-entropy over the steps of the global batch (Lightman 2023, section 2.6)."""

    def __init__(self, config: ProcessRewardModelConfig, *, pad_id: int) -> None:
        self._config = config
        self._pad_id = pad_id

    @property
    def model_kind(self) -> str:
        return "sequence-classification"

    def check_record(self, record: Mapping[str, Any]) -> None:
        """Raise `DataError` for a line without labelled steps, or with a step that has no text."""
        steps, labels = _list_of(str, record.get("steps")), _list_of(bool, record.get("labels"))
        if not steps or len(steps) != len(labels):
            raise DataError(
                "the record has no `steps` (texts) with as many `labels` (true or false)", where=_WHERE, hint=_HINT
            )
        if not all(step + self._config.step_separator for step in steps):
            raise DataError("a step of the record is empty", where=_WHERE, hint=_HINT)

    def encode(self, record: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> Steps | None:
        """`prompt` (text or chat messages), `steps` (texts) and `labels` (true: the step is right)."""
        self.check_record(record)
        ids = list(PromptEncoder(tokenizer).prompt(record, 0, _WHERE).prompt_ids)
        ends = []
        for step in record["steps"]:
            own = list(tokenizer(step + self._config.step_separator, add_special_tokens=False)["input_ids"])
            if not own:
                raise DataError("a step of the record is empty", where=_WHERE, hint=_HINT)
            ids += own
            ends.append(len(ids) - 1)
        if len(ids) > self._config.max_tokens:
            return None
        mask = torch.zeros(len(ids), dtype=torch.bool)
        mask[ends] = True
        return Steps(Example(torch.tensor(ids, dtype=torch.int64), mask), torch.tensor(record["labels"]))

    def collate(self, items: Sequence[Steps]) -> StepsBatch:
        return StepsBatch(
            collate_examples([item.example for item in items], pad_id=self._pad_id),
            torch.cat([item.right for item in items]),
        )

    def counts(self, batch: StepsBatch) -> Mapping[str, float]:
        return {"policy": float(batch.right.numel())}

    def loss(self, models: Mapping[str, nn.Module], batch: StepsBatch) -> LossOutput:
        rows, right = batch.examples, batch.right
        scores = token_scores(models["policy"], rows.input_ids, rows.attention_mask)[rows.loss_mask]
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
