"""The ptx loss: language modelling on pretraining text beside the policy's loss (InstructGPT, Ouyang 2022)."""

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
    """An experience with pretraining text beside it."""

    ptx_ids: Tensor
    """[B', T] int64, padded right."""
    ptx_mask: Tensor
    """[B', T] bool, True = a token that is predicted (never the first of a row)."""
    ptx_attention_mask: Tensor
    """[B', T] bool, True = a real token."""


class PretrainingData(Protocol):
    """Adds pretraining text to a batch."""

    def attach(self, batch: Experience, items: Sequence[BufferItem]) -> PretrainingExperience: ...


class PretrainingFile:
    """Texts of a JSON Lines file; sample n goes with text n modulo their number.

    So the text of an update does not depend on its split over micro-batches or ranks.
    """

    def __init__(self, path: str, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> None:
        eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self._encoded = [
            torch.tensor((tokenizer(text)["input_ids"] + eos)[:max_tokens], dtype=torch.int64)
            for text in _read_texts(Path(path))
        ]
        if not self._encoded:
            raise DataError("holds no text", where=path, hint='one {"text": "…"} a line')

    def attach(self, batch: Experience, items: Sequence[BufferItem]) -> PretrainingExperience:
        rows = [self._encoded[item.sample_id % len(self._encoded)] for item in items]
        counts = [bool(item.action_mask.any()) for item in items]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        lengths = torch.tensor([len(row) for row in rows])
        real = torch.arange(ids.shape[1]) < lengths[:, None]
        return with_pretraining(batch, ids, real, real & torch.tensor(counts)[:, None])


class PretrainingLoader:
    """Batches of a data loader (`input_ids`, `attention_mask`, maybe `labels` with -100 where nothing is learnt).

    Each micro-batch that counts takes one, so the text of an update depends on how it is split, as in ColossalChat;
    the loss is divided by all predicted tokens of the update either way.
    """

    def __init__(self, batches: Iterator[Mapping[str, Tensor]]) -> None:
        """`batches` is endless."""
        self._batches = batches
        self._last: Mapping[str, Tensor] | None = None

    def attach(self, batch: Experience, items: Sequence[BufferItem]) -> PretrainingExperience:
        counts = any(bool(item.action_mask.any()) for item in items)
        if counts or self._last is None:  # a masked filler micro-batch reuses the last text
            self._last = next(self._batches)
        text = {name: torch.as_tensor(values) for name, values in self._last.items()}
        real = text["attention_mask"].bool()
        learnt = real & (text["labels"] != -100) if "labels" in text else real
        return with_pretraining(batch, text["input_ids"], real, learnt if counts else torch.zeros_like(real))


def with_pretraining(batch: Experience, ids: Tensor, real: Tensor, learnt: Tensor) -> PretrainingExperience:
    """`learnt` marks the tokens to predict; the first token of a row has nothing to be predicted from."""
    learnt = learnt.clone()
    learnt[:, 0] = False
    values = {f.name: getattr(batch, f.name) for f in fields(Experience)}
    return PretrainingExperience(**values, ptx_ids=ids, ptx_mask=learnt, ptx_attention_mask=real)


def pretraining_count(batch: Experience) -> float:
    """Predicted tokens of the batch: its share of the divisor."""
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
            raise DataError('"text" must be text, and not empty', where=f"{path}:{number}")
        yield text
