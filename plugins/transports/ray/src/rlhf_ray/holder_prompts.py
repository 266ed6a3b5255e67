"""Batches of a data loader as prompts, numbered by maker, step and row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import DataError
from rlhf_core.prompts import PromptEncoder
from rlhf_core.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MAKER_BITS, _STEP_BITS, _ROW_BITS = 22, 24, 16
"""62 in all: sample ids are int64, and those from 1 << 62 belong to evaluation."""


def maker_number(name: str) -> int:
    """A number for a maker's name, the same in every run."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big") % (1 << _MAKER_BITS)


def sample_id(maker: int, step: int, row: int) -> int:
    """Unique number of a sample: row `row` of a maker's batch `step`, both from 0."""
    if row >= 1 << _ROW_BITS or step >= 1 << _STEP_BITS:
        raise DataError(f"row {row} of batch {step} cannot be numbered", where="data loader", hint="smaller batches")
    return (maker << _STEP_BITS | step) << _ROW_BITS | row


class BatchReader:
    """Reads batches: a mapping with `input_ids` (and `attention_mask`, and columns for the reward), a tensor of ids,
    a list of texts, or a list of records (`prompt` or `input_ids`, `answer`, anything else for the reward)."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, decoder: Any, maker: int) -> None:
        """decoder: turns ids into a prompt's text. tokenizer: None where all batches come as ids."""
        self._encoder = None if tokenizer is None else PromptEncoder(tokenizer)
        self._decoder = decoder
        self._maker = maker

    def read(self, batch: Any, step: int) -> list[Prompt]:
        """The batch's prompts. Raises `DataError` when it is none."""
        prompts = [
            self._prompt(record, sample_id(self._maker, step, row), f"batch {step}, row {row}")
            for row, record in enumerate(_rows(batch, step))
        ]
        if not prompts:
            raise DataError("the batch is empty", where=f"data loader, batch {step}")
        return prompts

    def _prompt(self, record: Mapping[str, Any], number: int, where: str) -> Prompt:
        if "input_ids" in record:
            ids = _real_ids(record, where)
            rest = {k: v for k, v in record.items() if k not in ("input_ids", "attention_mask", "answer", "prompt")}
            text = record.get("prompt")
            if not isinstance(text, str):
                text = self._decoder.decode(list(ids), skip_special_tokens=True)
            return Prompt(position=number, text=text, prompt_ids=ids, answer=record.get("answer"), metadata=rest)
        if self._encoder is None:
            raise DataError(
                "the prompt is text, but this maker has no tokenizer",
                where=where,
                hint="ExperienceMakerHolder.remote(…, tokenizer=tokenizer), or give input_ids",
            )
        return self._encoder.prompt(record, number, where)


def _rows(batch: Any, step: int) -> Iterator[Mapping[str, Any]]:
    if isinstance(batch, Mapping):
        yield from _columns_to_rows(batch, step)
    elif hasattr(batch, "tolist"):
        yield from ({"input_ids": ids} for ids in batch.tolist())
    elif isinstance(batch, Sequence) and not isinstance(batch, str):
        yield from (row if isinstance(row, Mapping) else {"prompt": row} for row in batch)
    else:
        raise DataError(
            f"a batch must be a mapping, a tensor or a list, not a {type(batch).__name__}",
            where=f"data loader, batch {step}",
        )


def _columns_to_rows(batch: Mapping[str, Any], step: int) -> Iterator[Mapping[str, Any]]:
    columns = {name: _plain(column) for name, column in batch.items()}
    main = "input_ids" if "input_ids" in columns else "prompt"
    if not isinstance(columns.get(main), Sequence):
        raise DataError(f"a batch needs input_ids or prompt, got {sorted(columns)}", where=f"data loader, batch {step}")
    size = len(columns[main])
    for name, column in columns.items():
        if isinstance(column, str) or not isinstance(column, Sequence) or len(column) != size:
            raise DataError(f"{name!r} is not a column of {size} rows", where=f"data loader, batch {step}")
    for row in range(size):
        yield {name: column[row] for name, column in columns.items()}


def _real_ids(record: Mapping[str, Any], where: str) -> tuple[int, ...]:
    """The prompt's tokens without its padding, on whichever side."""
    ids = _plain(record["input_ids"])
    mask = _plain(record.get("attention_mask"))
    if mask is None:
        return tuple(int(i) for i in ids)
    if len(mask) != len(ids):
        raise DataError(f"attention_mask has {len(mask)} entries, input_ids {len(ids)}", where=where)
    return tuple(int(i) for i, real in zip(ids, mask, strict=True) if real)


def _plain(values: Any) -> Any:
    return values.tolist() if hasattr(values, "tolist") else values


def batches_of(loader: Iterable[Any], num_epochs: int, num_steps: int) -> Iterator[Any]:
    """`num_epochs` passes over a loader, or, with `num_steps` > 0, so many batches of as many passes as that takes."""
    taken = 0
    epoch = 0
    while num_steps > 0 or epoch < num_epochs:
        before = taken
        for batch in loader:
            yield batch
            taken += 1
            if taken == num_steps:
                return
        epoch += 1
        if taken == before:
            raise DataError(
                "the data loader gives no batch" + (" the second time it is read" if taken else ""),
                where="workingloop",
                hint="dataloader_fn must return something that can be read again, not an iterator",
            )
