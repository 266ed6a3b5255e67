"""Answers in steps, each of which is right or wrong: the lines that a process reward model learns from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_core.errors import DataError
from rlhf_core.prompts import PromptEncoder

from .examples import Example, ExampleBatch, collate_examples

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

    def to(self, device: torch.device) -> StepsBatch:
        """The same on `device`."""
        return StepsBatch(self.examples.to(device), self.right.to(device))


def check_steps(record: Mapping[str, Any], *, separator: str, where: str) -> None:
    """Raise `DataError` for a line without labelled steps, or with a step that has no text."""
    steps, labels = _texts(record.get("steps")), _flags(record.get("labels"))
    if not steps or len(steps) != len(labels):
        raise DataError(
            "the record has no `steps` (texts) with as many `labels` (true or false)", where=where, hint=_HINT
        )
    if not all(step + separator for step in steps):
        raise DataError("a step of the record is empty", where=where, hint=_HINT)


def encode_steps(
    record: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, *, max_tokens: int, separator: str, where: str
) -> Steps | None:
    """The prompt, and each step with the separator behind it; None when that is too long."""
    check_steps(record, separator=separator, where=where)
    ids = list(PromptEncoder(tokenizer).prompt(record, 0, where).prompt_ids)
    ends = []
    for step in record["steps"]:
        own = list(tokenizer(step + separator, add_special_tokens=False)["input_ids"])
        if not own:
            raise DataError("a step of the record is empty", where=where, hint=_HINT)
        ids += own
        ends.append(len(ids) - 1)
    if len(ids) > max_tokens:
        return None
    mask = torch.zeros(len(ids), dtype=torch.bool)
    mask[ends] = True
    return Steps(Example(torch.tensor(ids, dtype=torch.int64), mask), torch.tensor(record["labels"]))


def collate_steps(items: Sequence[Steps], *, pad_id: int) -> StepsBatch:
    """Collate, padded to the longest."""
    return StepsBatch(
        collate_examples([item.example for item in items], pad_id=pad_id),
        torch.cat([item.right for item in items]),
    )


def _texts(values: Any) -> list[str]:
    """Empty where the values are no texts."""
    is_list = isinstance(values, list | tuple) and all(isinstance(each, str) for each in values)
    return list(values) if is_list else []


def _flags(values: Any) -> list[bool]:
    is_list = isinstance(values, list | tuple) and all(isinstance(each, bool) for each in values)
    return list(values) if is_list else []
