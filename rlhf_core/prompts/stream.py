"""The endless, reproducible stream of encoded prompts that a run trains on.

`Records` decides which record is at a position. With a sampler, that is decided when the record is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from ..columns import Column
from ..errors import DataError, PluginError
from ..models.kinds import ModelKind
from ..protocols import OrderedPromptSource, PromptSource
from ..types import Prompt
from .encoder import PromptEncoder as PromptEncoder
from .encoder import Record as Record
from .encoder import check_prompt
from .records import Check, RecordRules, Records

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptStream:
    """An endless stream of encoded prompts, and a fixed list of held-out ones for evaluation.

    A text prompt is encoded as it is, with the tokenizer's own special tokens; chat messages go through the
    tokenizer's own chat template, which ends where the answer begins.
    """

    def __init__(
        self,
        source: PromptSource | OrderedPromptSource,
        tokenizer: PreTrainedTokenizerBase,
        *,
        seed: int,
        held_out: int = 0,
        max_prompt_tokens: int | None = None,
        too_long: Literal["skip", "error"] = "skip",
        may_be_empty: bool = False,
        skip_duplicates: bool = False,
        keep: Callable[[Record], bool] | None = None,
        check: Check | None = None,
        measured: int | None = None,
        kind: ModelKind | None = None,
    ) -> None:
        """Check every record. Raises `DataError` on those that are no prompts, are too long under `error`, or fail
        `check`, and on an empty stream.

        may_be_empty: allow prompts without tokens, for which an environment gives the first text. keep: the records
        to use. measured: encode only so many to know their length; the stream is then good for a check only. kind: of
        the model that gets the prompts.
        """
        self._may_be_empty = may_be_empty
        self._check = check
        own: Mapping[str, Column] = getattr(source, "columns", {})
        self._encoder = PromptEncoder(tokenizer, kind=kind, columns=own)
        self._max_prompt_tokens = max_prompt_tokens
        self._too_long = too_long
        rules = RecordRules(
            check=self._check_record,
            fits=self._fits,
            measured=measured,
            skip_duplicates=skip_duplicates,
            keep=keep,
        )
        self.records: Records
        if isinstance(source, OrderedPromptSource):
            self.records = source.make_records(rules, seed=seed, held_out=held_out)
        elif isinstance(source, PromptSource):
            self.records = Records(source, rules, seed=seed, held_out=held_out)
        else:
            raise PluginError(
                f"a {type(source).__name__} has no length, so its records have no order",
                where="prompts",
                hint="make it a source of a mixture (docs/data.md), or give it a method make_records",
            )

    def __len__(self) -> int:
        """Number of training prompts: one epoch. Raises `TypeError` if it is unknown."""
        if self.records.training is None:
            raise TypeError("a streamed source has no length")
        return len(self.records.training)

    @property
    def columns(self) -> Mapping[str, Column]:
        """The columns of its prompts."""
        return self._encoder.columns

    def prompt(self, position: int, index: int | None = None) -> Prompt:
        """Return the training prompt at `position` (>= 0) of the endless stream.

        index: of its record in the source, if a sampler has drawn it.
        """
        record, name = self.records.at(position) if index is None else self.records.at_index(index)
        return self._encoder.prompt(record, position, name)

    def record(self, position: int) -> Record:
        return self.records.at(position)[0]

    def evaluation_prompts(self, first: int | None = None) -> list[Prompt]:
        """Return the held-out prompts, numbered from 0 separately, or so many of the first epoch."""
        return [self._encoder.prompt(record, i, name) for i, (record, name) in enumerate(self._evaluated(first))]

    def evaluation_records(self, first: int | None = None) -> list[Record]:
        """Return the records of `evaluation_prompts`."""
        return [record for record, _ in self._evaluated(first)]

    def _evaluated(self, first: int | None) -> list[tuple[Record, str]]:
        if first is None:
            return self.records.held_out()
        training = self.records.training
        return [self.records.at(i) for i in range(first if training is None else min(first, len(training)))]

    def _check_record(self, record: Record, name: str) -> None:
        check_prompt(record, name, may_be_empty=self._may_be_empty)
        if self._check is not None:
            self._check(record, name)

    def _fits(self, records: Sequence[Record], names: Sequence[str]) -> list[bool]:
        lengths = self._encoder.lengths(records, names)
        if 0 in lengths and not self._may_be_empty:
            raise DataError("the prompt encodes to no tokens", where=names[lengths.index(0)])
        limit = self._max_prompt_tokens
        if limit is None:
            return [True] * len(records)
        fits = [length <= limit for length in lengths]
        if self._too_long == "error" and not all(fits):
            worst = fits.index(False)
            raise DataError(
                f"the prompt has {lengths[worst]} tokens, more than max_prompt_tokens ({limit})",
                where=names[worst],
                hint="raise prompts.max_prompt_tokens, or say prompts.too_long: skip",
            )
        return fits
