"""Unpadded training examples and batches of them, shared by all offline algorithms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from rlhf_core import Columns
from rlhf_core.batching import collate
from rlhf_core.models import ModelKind
from rlhf_core.types import BufferItem
from rlhf_forward import causal_lm_logits, next_log_probs
from rlhf_objective import encoded_answer


@dataclass(frozen=True, slots=True)
class Example:
    """One example, unpadded."""

    input_ids: Tensor
    """[S] int64, prompt then answer."""
    loss_mask: Tensor
    """[S] bool, True for a trained token, or for the token at which a step is judged."""
    right: Tensor | None = None
    """[S] bool, whether the step a token belongs to is right."""
    columns: Columns = field(default_factory=Columns)
    """Inputs of the model from the prompt."""

    @property
    def num_tokens(self) -> int:
        return int(self.input_ids.numel())

    def masked(self) -> Example:
        """Return a copy with an empty loss mask."""
        return replace(self, loss_mask=torch.zeros_like(self.loss_mask))


@dataclass(frozen=True, slots=True)
class ExampleBatch:
    """Examples, right-padded."""

    input_ids: Tensor
    """[B, S] int64."""
    attention_mask: Tensor
    """[B, S] bool, True for real tokens."""
    loss_mask: Tensor
    """[B, S] bool, True for trained tokens."""
    right: Tensor | None = None
    """[B, S] bool, whether the step a token belongs to is right."""
    columns: Columns = field(default_factory=Columns)
    """Inputs of the model from the prompts, [B, ...]."""

    def __len__(self) -> int:
        return int(self.input_ids.shape[0])

    @property
    def targets(self) -> Tensor:
        """Next token at each position but the last, [B, S - 1] int64."""
        return self.input_ids[:, 1:]

    @property
    def target_mask(self) -> Tensor:
        """[B, S - 1] bool, True for trained targets. A row's first token lacks context and is never a target."""
        return self.loss_mask[:, 1:]


def answer_example(
    record: Mapping[str, Any],
    answer: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    add_eos: bool,
    where: str,
    kind: ModelKind | None = None,
) -> Example:
    """Encode the record's `prompt` (text or chat messages) followed by `answer`. Only the answer is trained.

    `kind`: the policy's kind, which may add inputs of the model.
    """
    prompt, answer_ids = encoded_answer(record, answer, tokenizer, add_eos=add_eos, where=where, kind=kind)
    ids = torch.tensor([*prompt.prompt_ids, *answer_ids], dtype=torch.int64)
    return Example(ids, torch.arange(len(ids)) >= len(prompt.prompt_ids), columns=prompt.columns)


def collate_examples(examples: Sequence[Example], *, pad_id: int = 0) -> ExampleBatch:
    """Collate examples into rows padded to the longest. Either all examples have judged steps or none."""
    ids = pad_sequence([each.input_ids for each in examples], batch_first=True, padding_value=pad_id)
    mask = pad_sequence([each.loss_mask for each in examples], batch_first=True)
    lengths = torch.tensor([each.num_tokens for each in examples])
    right = [each.right for each in examples if each.right is not None]
    steps = pad_sequence(right, batch_first=True) if right else None
    columns = _stack([each.columns for each in examples])
    return ExampleBatch(ids, torch.arange(ids.shape[1]) < lengths[:, None], mask, steps, columns)


def _stack(rows: Sequence[Columns]) -> Columns:
    """Stack the columns of prompts as core does in a batch of samples."""
    if not any(rows):
        return Columns()
    token = torch.zeros(1, dtype=torch.int64)
    samples = [
        BufferItem(
            sample_id=row,
            group_id=row,
            policy_version=0,
            prompt_ids=token,
            response_ids=token,
            action_mask=token.bool(),
            action_log_probs=token.float(),
            columns=columns,
        )
        for row, columns in enumerate(rows)
    ]
    return collate(samples).columns


def target_logits(model: nn.Module, batch: ExampleBatch) -> Tensor:
    """Logits of `batch.targets`, [B, S - 1, V]."""
    inputs = batch.columns.model_inputs
    return causal_lm_logits(model, batch.input_ids, batch.attention_mask, columns=inputs)[:, :-1]


def answer_log_probs(model: nn.Module, batch: ExampleBatch) -> Tensor:
    """Summed log-probs of each row's trained tokens, [B] float32 nats, 0 without trained tokens."""
    is_read = torch.nn.functional.pad(batch.target_mask, (0, 1))
    inputs = batch.columns.model_inputs
    return next_log_probs(model, batch.input_ids, batch.attention_mask, is_read, columns=inputs).sum(-1)
