"""Cross-entropy on the texts of a file, added to a policy's loss (`ptx` of InstructGPT, Ouyang 2022)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from rlhf_core.errors import DataError
from rlhf_core.models import ModelKind
from rlhf_core.prompts import PromptEncoder
from rlhf_core.types import BufferItem, Experience, Prompt
from rlhf_forward import causal_lm_logits, masked_sum

from . import masked_cross_entropy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class TextExperience(Experience):
    """An experience with a batch of texts."""

    text_ids: Tensor
    """[B', T] int64, right-padded."""
    text_mask: Tensor
    """[B', T] bool, True for predicted tokens. The first token of a row is never predicted."""
    text_attention_mask: Tensor
    """[B', T] bool, True for real tokens."""


class TextData(Protocol):
    """Adds texts to a batch.

    Example:
        batch = texts.attach(collate(items), items)  # in `Algorithm.collate`
        loss = text_loss(policy, batch) / text_count(batch)
    """

    def attach(self, batch: Experience, items: Sequence[BufferItem]) -> TextExperience:
        """Return the batch with texts.

        Args:
            batch: The collated items.
            items: The items. If all of them are masked, no token of the texts counts.
        """
        ...


class TextFile:
    """Texts of a JSON Lines file. Sample n is paired with text n modulo the number of texts.

    Thus the text of an update does not depend on its split into micro-batches or ranks. A line has a `text`, whose
    tokens are all predicted but the first, or a `prompt` (text or chat messages) and a `completion`, whose tokens alone
    are predicted.
    """

    def __init__(self, path: str, tokenizer: PreTrainedTokenizerBase, max_tokens: int, *, option: str) -> None:
        """Read and encode all lines.

        Args:
            path: File of the texts.
            tokenizer: The policy's tokenizer.
            max_tokens: Maximum tokens of a text. The rest of a longer one is cut off.
            option: Option that names the file, for errors.

        Raises:
            DataError: The file cannot be read, is empty, or a line has other keys or leaves nothing to predict.
        """
        self._encoded = [
            _encoded(record, tokenizer, max_tokens, where) for where, record in _read_lines(Path(path), option)
        ]
        if not self._encoded:
            raise DataError("contains no text", where=path, hint='write one {"text": "…"} per line')

    def attach(self, batch: Experience, items: Sequence[BufferItem]) -> TextExperience:
        rows = [self._encoded[item.sample_id % len(self._encoded)] for item in items]
        counts = torch.tensor([bool(item.action_mask.any()) for item in items])
        ids = torch.nn.utils.rnn.pad_sequence([ids for ids, _ in rows], batch_first=True)
        positions = torch.arange(ids.shape[1])
        real = positions < torch.tensor([[len(ids)] for ids, _ in rows])
        predicted = real & (positions >= torch.tensor([[first] for _, first in rows]))
        return with_text(batch, ids, real, predicted & counts[:, None])


class TextLoader:
    """Batches of a data loader: `input_ids`, `attention_mask`, and optionally `labels` with -100 for tokens not
    predicted.

    Each micro-batch that is not masked takes the next batch, so the text of an update depends on its split into
    micro-batches, as in ColossalChat. The loss is divided by the number of predicted tokens in the update.
    """

    def __init__(self, batches: Iterator[Mapping[str, Tensor]]) -> None:
        """Read batches as they are needed.

        Args:
            batches: An endless iterator.
        """
        self._batches = batches
        self._last: Mapping[str, Tensor] | None = None

    def attach(self, batch: Experience, items: Sequence[BufferItem]) -> TextExperience:
        counts = any(bool(item.action_mask.any()) for item in items)
        if counts or self._last is None:  # a fully masked filler micro-batch reuses the last text
            self._last = next(self._batches)
        text = {name: torch.as_tensor(values) for name, values in self._last.items()}
        real = text["attention_mask"].bool()
        predicted = real & (text["labels"] != -100) if "labels" in text else real
        return with_text(batch, text["input_ids"], real, predicted if counts else torch.zeros_like(real))


def with_text(batch: Experience, ids: Tensor, real: Tensor, predicted: Tensor) -> TextExperience:
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
    return TextExperience(**values, text_ids=ids, text_mask=predicted, text_attention_mask=real)


def text_count(batch: Experience) -> float:
    """Count the predicted tokens in the texts of a batch, which is its share of the divisor.

    Args:
        batch: A result of `TextData.attach`.

    Returns:
        Number of tokens.
    """
    assert isinstance(batch, TextExperience)
    return float(batch.text_mask.sum())


def text_loss(policy: nn.Module, batch: Experience) -> Tensor:
    """Sum -log p over the predicted tokens of the texts of a batch, at temperature 1.

    Args:
        policy: A causal LM, possibly wrapped.
        batch: A result of `TextData.attach`, on the model's device.

    Returns:
        Scalar, in nats.
    """
    assert isinstance(batch, TextExperience)
    logits = causal_lm_logits(policy, batch.text_ids, batch.text_attention_mask)
    mask = batch.text_mask[:, 1:]
    return masked_sum(masked_cross_entropy(logits[:, :-1], batch.text_ids[:, 1:], mask), mask)


def encoded_answer(
    record: Mapping[str, Any],
    answer: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    add_eos: bool,
    where: str,
    kind: ModelKind | None = None,
) -> tuple[Prompt, list[int]]:
    """Encode the `prompt` of a record (text or chat messages) and an answer to it.

    Args:
        record: Has `prompt`, and the inputs that `kind` reads.
        answer: Text of the answer.
        tokenizer: The policy's tokenizer.
        add_eos: Whether to append the end-of-sequence token to the answer.
        where: Name of the record in errors.
        kind: The policy's kind, which may add inputs of the model. None if only text is encoded.

    Returns:
        The prompt, and the token ids of the answer.

    Raises:
        DataError: The prompt is invalid.
    """
    prompt = PromptEncoder(tokenizer, kind=kind).prompt(record, 0, where)
    answer_ids = list(tokenizer(answer, add_special_tokens=False)["input_ids"])
    if add_eos and tokenizer.eos_token_id is not None:
        answer_ids.append(tokenizer.eos_token_id)
    return prompt, answer_ids


def _encoded(
    record: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, max_tokens: int, where: str
) -> tuple[Tensor, int]:
    """Return the [T] ids of a line, with EOS, and the index of the first predicted token."""
    text, completion = record.get("text"), record.get("completion")
    if isinstance(text, str) and text:
        eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        ids = (tokenizer(text)["input_ids"] + eos)[:max_tokens]
        if len(ids) < 2:
            raise DataError("its text has one token, which leaves none to predict", where=where, hint="remove the line")
        return torch.tensor(ids, dtype=torch.int64), 1
    if not isinstance(completion, str) or not completion or "prompt" not in record:
        problem = "has neither a `text` nor a `prompt` and a `completion` that are not empty"
        raise DataError(problem, where=where, hint='write {"text": "…"} or {"prompt": …, "completion": "…"}')
    prompt, answer_ids = encoded_answer(record, completion, tokenizer, add_eos=True, where=where)
    first = len(prompt.prompt_ids)
    if first >= max_tokens:
        problem = f"its prompt has {first} tokens, which leaves none of {max_tokens} for the completion"
        raise DataError(problem, where=where, hint="shorten the prompt, or raise the maximum number of tokens")
    return torch.tensor([*prompt.prompt_ids, *answer_ids][:max_tokens], dtype=torch.int64), first


def _read_lines(path: Path, option: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield file and line number, and the object of each line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot be read: {error}", where=str(path), hint=f"check {option}") from error
    for number, line in enumerate(lines, start=1):
        where = f"{path}:{number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            raise DataError("is not JSON", where=where, hint='write one {"text": "…"} per line') from None
        if not isinstance(record, dict):
            raise DataError("is not a JSON object", where=where, hint='write one {"text": "…"} per line')
        yield where, record
