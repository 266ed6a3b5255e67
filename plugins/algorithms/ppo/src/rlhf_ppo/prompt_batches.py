"""Batches of a user's data loader as prompts: ColossalChat's token batches, or records as in a prompt file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, Generic, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from rlhf_core.errors import DataError
from rlhf_core.prompts import PromptEncoder
from rlhf_core.types import Prompt

B = TypeVar("B")
_WHERE = "prompt_dataloader"


class CycledLoader(Generic[B]):
    """A loader without end: at its end it starts again, so a shuffling one shuffles anew."""

    def __init__(self, loader: Iterable[B], *, where: str, skip: int = 0) -> None:
        """`skip`: batches that were taken before a resume; as many are passed over here."""
        self._loader = loader
        self._where = where
        self._batches: Iterator[B] = iter(())
        self.num_taken = 0
        length = len(loader) if isinstance(loader, Sized) else 0
        for _ in range(skip % length if length else skip):
            next(self)
        self.num_taken = skip

    def __iter__(self) -> CycledLoader[B]:
        return self

    def __next__(self) -> B:
        """Raises `DataError` when the loader has nothing at all."""
        self.num_taken += 1
        for batch in self._batches:
            return batch
        self._batches = iter(self._loader)
        for batch in self._batches:
            return batch
        raise DataError("gives no batch", where=self._where, hint="is the dataset empty, or drop_last larger than it?")


def read_prompts(batch: Any, tokenizer: PreTrainedTokenizerBase, first_position: int) -> list[Prompt]:
    """The prompts of one batch, numbered from `first_position`.

    Either a mapping with `input_ids` and `attention_mask` ([B, P], padded on either side), or records with `prompt`
    (text or chat messages), as a list of mappings or as a mapping of lists. `gt_answer` or `answer` goes to the reward
    as the answer, other keys as metadata. Raises `DataError`.
    """
    if isinstance(batch, Mapping) and "input_ids" in batch:
        return _token_prompts(batch, tokenizer, first_position)
    encoder = PromptEncoder(tokenizer)
    rows = _rows(batch) if isinstance(batch, Mapping) else batch
    if not isinstance(rows, Sequence) or not all(isinstance(row, Mapping) for row in rows) or not rows:
        raise DataError(
            f"gives {type(batch).__name__} batches that hold no prompts",
            where=_WHERE,
            hint="a batch is a dict of input_ids and attention_mask, or records with a prompt each",
        )
    return [
        encoder.prompt(_with_answer(row), first_position + index, f"{_WHERE}, row {index + 1}")
        for index, row in enumerate(rows)
    ]


def _token_prompts(batch: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, first_position: int) -> list[Prompt]:
    ids = torch.as_tensor(batch["input_ids"])
    if "attention_mask" not in batch:
        # A pad token may be a real one (EOS often is), so the ids alone cannot tell.
        raise DataError("a batch has input_ids but no attention_mask", where=_WHERE, hint="pad with tokenizer.pad(...)")
    mask = torch.as_tensor(batch["attention_mask"]).bool()
    if ids.ndim != 2 or mask.shape != ids.shape:
        raise DataError(
            f"input_ids {tuple(ids.shape)} and attention_mask {tuple(mask.shape)} should both be [batch, tokens]",
            where=_WHERE,
        )
    others = _rows({key: value for key, value in batch.items() if key not in ("input_ids", "attention_mask")}, len(ids))
    prompts = []
    for index, row in enumerate(others):
        tokens = ids[index][mask[index]].tolist()
        record = _with_answer(row)
        text = record.get("prompt", None)
        prompts.append(
            Prompt(
                position=first_position + index,
                text=text if isinstance(text, str) else str(tokenizer.decode(tokens, skip_special_tokens=True)),
                prompt_ids=tuple(tokens),
                answer=record.get("answer"),
                metadata={key: value for key, value in record.items() if key not in ("prompt", "answer")},
            )
        )
    return prompts


def _rows(columns: Mapping[str, Any], count: int | None = None) -> list[dict[str, Any]]:
    """A mapping of columns as rows. Tensors of one number each become plain numbers."""
    plain = {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in columns.items()}
    count = len(next(iter(plain.values()))) if count is None and plain else count or 0
    for key, value in plain.items():
        if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != count:
            raise DataError(f"`{key}` is not one value for each of the {count} prompts of its batch", where=_WHERE)
    return [{key: value[index] for key, value in plain.items()} for index in range(count)]


def _with_answer(row: Mapping[str, Any]) -> dict[str, Any]:
    record = dict(row)
    if "gt_answer" in record:
        record.setdefault("answer", record.pop("gt_answer"))
    return record
