"""Convert batches of a user's data loader to prompts: ColossalChat's token batches, texts, or prompt-file records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import DataError
from rlhf_core.prompts.stream import PromptEncoder
from rlhf_core.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NOT_METADATA = ("input_ids", "attention_mask", "prompt", "answer")


class BatchReader:
    """Convert batches of a data loader to prompts. A batch has one of these forms:

    - a mapping of columns: `input_ids` and `attention_mask` ([B, P], padded on either side), or `prompt`
    - a list of records with `input_ids` or `prompt` (text or chat messages), or a list of texts
    - a tensor of ids [B, P] without padding

    `gt_answer` or `answer` is passed to the reward as the answer. Other keys become metadata.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, decoder: Any, *, needs_mask: bool) -> None:
        """Create a reader for one tokenizer.

        Args:
            tokenizer: Tokenizer for text prompts. None if all batches contain token ids.
            decoder: Object whose `decode` converts token ids to the text of a prompt.
            needs_mask: Reject token ids without an attention mask, because padding cannot be distinguished from
                real tokens.
        """
        self._encoder = None if tokenizer is None else PromptEncoder(tokenizer)
        self._decoder = decoder
        self._needs_mask = needs_mask

    def read(self, batch: Any, first_position: int, where: str) -> list[Prompt]:
        """Return the batch's prompts, numbered from `first_position`.

        Args:
            batch: Batch in one of the class's forms.
            first_position: Position of the first prompt in the run.
            where: Name of the batch in error messages.

        Raises:
            DataError: The batch is invalid.
        """
        rows = _rows(batch, where)
        if not rows:
            raise DataError("the batch is empty: it contains no prompts", where=where)
        return [
            self._prompt(_with_answer(row), first_position + index, f"{where}, row {index + 1}")
            for index, row in enumerate(rows)
        ]

    def _prompt(self, record: Mapping[str, Any], position: int, where: str) -> Prompt:
        if "input_ids" in record:
            prompt = self._token_prompt(record, position, where)
        elif self._encoder is not None:
            prompt = self._encoder.prompt(record, position, where)
        else:
            raise DataError(
                "the prompt is text, but the tokenizer is None", where=where, hint="pass tokenizer=…, or input_ids"
            )
        if not prompt.prompt_ids:
            raise DataError("the prompt is empty: 0 tokens", where=where)
        return prompt

    def _token_prompt(self, record: Mapping[str, Any], position: int, where: str) -> Prompt:
        ids = self._real_ids(record, where)
        text = record.get("prompt")
        return Prompt(
            position=position,
            text=text if isinstance(text, str) else str(self._decoder.decode(list(ids), skip_special_tokens=True)),
            prompt_ids=ids,
            answer=record.get("answer"),
            metadata={key: value for key, value in record.items() if key not in _NOT_METADATA},
        )

    def _real_ids(self, record: Mapping[str, Any], where: str) -> tuple[int, ...]:
        """The prompt's token ids without padding on either side."""
        ids, mask = plain(record["input_ids"]), plain(record.get("attention_mask"))
        if mask is None and self._needs_mask:
            # The pad token may also be a real token (often EOS), so padding cannot be found from the ids alone.
            raise DataError("input_ids without attention_mask", where=where, hint="pad with tokenizer.pad(...)")
        num_ids = _num_tokens(ids)
        num_mask = num_ids if mask is None else _num_tokens(mask)
        if num_ids is None or num_ids != num_mask:
            lengths = " and ".join("none" if count is None else str(count) for count in (num_ids, num_mask))
            raise DataError(
                f"input_ids and attention_mask must have the same shape [batch, tokens], got rows of {lengths} tokens",
                where=where,
            )
        real = [True] * num_ids if mask is None else mask
        return tuple(int(token) for token, is_real in zip(ids, real, strict=True) if is_real)


def _rows(batch: Any, where: str) -> Sequence[Mapping[str, Any]]:
    if isinstance(batch, Mapping):
        return _columns_to_rows(batch, where)
    if hasattr(batch, "tolist"):
        ids = batch.tolist()
        return [{"input_ids": row} for row in (ids if isinstance(ids, list) else [ids])]
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        return [row if isinstance(row, Mapping) else {"prompt": row} for row in batch]
    raise DataError(
        f"a batch of type {type(batch).__name__} contains no prompts",
        where=where,
        hint="a batch is a dict of input_ids and attention_mask, or a list of records with a prompt",
    )


def _columns_to_rows(batch: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    columns = {name: plain(column) for name, column in batch.items()}
    main = next((name for name in ("input_ids", "prompt", "messages") if name in columns), None)
    if main is None:
        raise DataError(f"the batch lacks `prompt` and `input_ids` (keys: {sorted(columns)})", where=where)
    size = len(columns[main]) if _is_column(columns[main]) else None
    for name, column in columns.items():
        if not _is_column(column) or len(column) != size:
            raise DataError(f"`{name}` is not one value for each of the {size or 0} prompts in its batch", where=where)
    return [{name: column[row] for name, column in columns.items()} for row in range(size or 0)]


def _with_answer(row: Mapping[str, Any]) -> dict[str, Any]:
    record = dict(row)
    if "gt_answer" in record:
        record.setdefault("answer", record.pop("gt_answer"))
    return record


def plain(values: Any) -> Any:
    """Convert tensors and arrays to lists of Python numbers."""
    return values.tolist() if hasattr(values, "tolist") else values


def _is_column(values: Any) -> bool:
    return isinstance(values, Sequence) and not isinstance(values, str)


def _num_tokens(row: Any) -> int | None:
    """Length of a row of numbers. None for any other value."""
    return len(row) if _is_column(row) and not any(isinstance(entry, Sequence) for entry in row) else None
