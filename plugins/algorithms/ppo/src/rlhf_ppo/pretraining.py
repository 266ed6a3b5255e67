"""The ptx loss: language modeling on pretraining text, added to the policy's loss (InstructGPT, Ouyang 2022)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from rlhf_core.errors import DataError
from rlhf_core.types import BufferItem, Experience
from rlhf_forward import causal_lm_logits, masked_sum
from rlhf_objective import masked_cross_entropy


@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainingExperience(Experience):
    """An experience with a batch of pretraining text."""

    ptx_ids: Tensor
    """[B', T] int64, right-padded."""
    ptx_mask: Tensor
    """[B', T] bool, True for predicted tokens. The first token of a row is never predicted."""
    ptx_attention_mask: Tensor
    """[B', T] bool, True for real tokens."""


class PretrainingData(Protocol):
    """Adds pretraining text to a batch."""

    def attach(self, batch: Experience, items: Sequence[BufferItem]) -> PretrainingExperience: ...


class PretrainingFile:
    """Texts of a JSON Lines file. Sample n is paired with text n modulo the number of texts.

    Thus the text of an update does not depend on its split into micro-batches or ranks.
    """

    def __init__(self, path: str, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> None:
        eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self._encoded = [
            torch.tensor((tokenizer(text)["input_ids"] + eos)[:max_tokens], dtype=torch.int64)
            for text in _read_texts(Path(path))
        ]
        if not self._encoded:
            raise DataError("contains no text", where=path, hint='write one {"text": "…"} per line')

    def attach(self, batch: Experience, items: Sequence[BufferItem]) -> PretrainingExperience:
        rows = [self._encoded[item.sample_id % len(self._encoded)] for item in items]
        counts = [bool(item.action_mask.any()) for item in items]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        lengths = torch.tensor([len(row) for row in rows])
        real = torch.arange(ids.shape[1]) < lengths[:, None]
        return with_pretraining(batch, ids, real, real & torch.tensor(counts)[:, None])


class PretrainingLoader:
    """Batches of a data loader: `input_ids`, `attention_mask`, and optionally `labels` with -100 for tokens not
    predicted.

    Each micro-batch that is not masked takes the next batch, so the text of an update depends on its split into
    micro-batches, as in ColossalChat. The loss is divided by the number of predicted tokens in the update.
    """

    def __init__(self, batches: Iterator[Mapping[str, Tensor]]) -> None:
        """Read from `batches`, an endless iterator."""
        self._batches = batches
        self._last: Mapping[str, Tensor] | None = None

    def attach(self, batch: Experience, items: Sequence[BufferItem]) -> PretrainingExperience:
        counts = any(bool(item.action_mask.any()) for item in items)
        if counts or self._last is None:  # a fully masked filler micro-batch reuses the last text
            self._last = next(self._batches)
        text = {name: torch.as_tensor(values) for name, values in self._last.items()}
        real = text["attention_mask"].bool()
        predicted = real & (text["labels"] != -100) if "labels" in text else real
        return with_pretraining(batch, text["input_ids"], real, predicted if counts else torch.zeros_like(real))


def with_pretraining(batch: Experience, ids: Tensor, real: Tensor, predicted: Tensor) -> PretrainingExperience:
    """Add a batch of text to an experience.

    Args:
        batch: Experience to extend.
        ids: [B', T] int64.
        real: [B', T] bool, True for real tokens.
        predicted: [B', T] bool, True for tokens to predict. The first token of a row is excluded.
    """
    predicted = predicted.clone()
    predicted[:, 0] = False
    values = {f.name: getattr(batch, f.name) for f in fields(Experience)}
    return PretrainingExperience(**values, ptx_ids=ids, ptx_mask=predicted, ptx_attention_mask=real)


def pretraining_count(batch: Experience) -> float:
    """Number of predicted tokens in the batch, which is its share of the divisor."""
    assert isinstance(batch, PretrainingExperience)
    return float(batch.ptx_mask.sum())


def pretraining_loss(policy: nn.Module, batch: Experience) -> Tensor:
    """Sum of -log p over the predicted pretraining tokens, in nats (scalar)."""
    assert isinstance(batch, PretrainingExperience)
    logits = causal_lm_logits(policy, batch.ptx_ids, batch.ptx_attention_mask)
    mask = batch.ptx_mask[:, 1:]
    return masked_sum(masked_cross_entropy(logits[:, :-1], batch.ptx_ids[:, 1:], mask), mask)


def _read_texts(path: Path) -> Iterator[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot be read: {error}", where=str(path), hint="check algorithm.ptx_path") from error
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            text = record["text"]
        except (ValueError, KeyError, TypeError):
            raise DataError('is not {"text": "…"}', where=f"{path}:{number}") from None
        if not isinstance(text, str) or not text:
            raise DataError('"text" must be a non-empty string', where=f"{path}:{number}")
        yield text
