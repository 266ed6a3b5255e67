"""The endless, reproducible stream of prompts that a run trains on, made from records.

`RecordStream` splits a source into held-out and training records and orders them; `StreamedRecords` reads one whose
length is unknown. `PromptStream` encodes the records of either. The record at a position depends only on the records,
the seed and the options; with a sampler, which record a position has is decided as it is drawn.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from ..columns import Column
from ..errors import DataError
from ..models.kinds import ModelKind
from ..protocols import PromptSource, StreamingPromptSource
from ..types import Prompt
from ..util.rng import permutation
from .encoder import PromptEncoder as PromptEncoder
from .encoder import Record as Record
from .encoder import check_prompt, is_plain
from .mixture import StreamedMixture
from .order import Part, RecordOrder, order_of, shares
from .records import Check, Records, Selected, Selecting, record_name, records_digest
from .streamed import MixedRecords, StreamedRecords

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RecordStream(Records):
    """An endless stream over the training records of a source, reshuffled each epoch; the rest is held out."""

    def __init__(
        self, source: PromptSource, *, seed: int, held_out: int = 0, selecting: Selecting | None = None
    ) -> None:
        """Read every record once. Raises `DataError` when one is wrong or no training record is left."""
        self._source = source
        selected = Selected(source, selecting or Selecting())
        self.digest, self.counts, usable = selected.digest, selected.counts, selected.usable
        if len(usable) <= held_out:
            skipped = self.counts["records"] - len(usable)
            refused = f" ({skipped} more were refused)" if skipped else ""
            raise DataError(
                f"{len(usable)} usable records{refused}, {held_out} of them to be held out: none is left to train on",
                where="prompts",
                hint="give more data, or lower eval.num_prompts" if usable else "raise prompts.max_prompt_tokens",
            )
        split = permutation(len(usable), seed, "held-out")[:held_out]
        self._held_out = [usable[i] for i in split]
        kept_back = set(self._held_out)
        self.training: Sequence[int] = array("q", (i for i in usable if i not in kept_back)) if kept_back else usable
        """Indices in the source, in its order."""
        self.epoch_size = len(self.training)
        parts: Sequence[Part] = getattr(source, "parts", ())
        self.order: RecordOrder = order_of(self.training, parts, seed)

    def has_digest(self, digest: str) -> bool:
        return digest == self.digest or digest == records_digest(self._source)

    def at(self, position: int) -> tuple[Record, str]:
        return self.at_index(self.order.index(position))

    def at_index(self, index: int) -> tuple[Record, str]:
        return self._source[index], record_name(self._source, index)

    def held_out(self) -> list[tuple[Record, str]]:
        return [self.at_index(index) for index in self._held_out]


class PromptStream:
    """An endless stream of encoded prompts, and a fixed list of held-out ones for evaluation.

    A text prompt is encoded as it is, with the tokenizer's own special tokens; chat messages go through the
    tokenizer's own chat template, which ends where the answer begins. `text_as_chat` sends a text prompt
    through the template too, as one user message.
    """

    def __init__(
        self,
        source: PromptSource | StreamingPromptSource,
        tokenizer: PreTrainedTokenizerBase,
        *,
        seed: int,
        held_out: int = 0,
        max_prompt_tokens: int | None = None,
        too_long: Literal["skip", "error"] = "skip",
        text_as_chat: bool = False,
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
        self._encoder = PromptEncoder(tokenizer, text_as_chat=text_as_chat, kind=kind, columns=own)
        self._max_prompt_tokens = max_prompt_tokens
        self._too_long = too_long
        selecting = Selecting(
            check=self._check_record,
            fits=self._fits,
            measured=measured,
            skip_duplicates=skip_duplicates,
            keep=keep,
        )
        self.records: Records = _records(source, seed=seed, held_out=held_out, selecting=selecting)

    def __len__(self) -> int:
        """Training prompts: one epoch. Raises `TypeError` where their number is unknown."""
        if self.records.epoch_size is None:
            raise TypeError("a streamed source has no length")
        return self.records.epoch_size

    @property
    def skipped(self) -> int:
        """Prompts left out, whatever the reason."""
        return sum(count for reason, count in self.counts.items() if reason != "records")

    @property
    def counts(self) -> Mapping[str, int]:
        """`records` read, and those left out by reason, for the manifest."""
        return self.records.counts

    @property
    def columns(self) -> Mapping[str, Column]:
        """Those of its prompts."""
        return self._encoder.columns

    @property
    def digest(self) -> str:
        """SHA-256 of all records, for the manifest."""
        return self.records.digest

    def has_digest(self, digest: str) -> bool:
        """Whether the records are those of a digest, also of one that an earlier version took."""
        return self.records.has_digest(digest)

    def prompt(self, position: int, index: int | None = None) -> Prompt:
        """The training prompt at `position` (>= 0) of the endless stream.

        index: of its record in the source, where a sampler has drawn it.
        """
        record, name = self.records.at(position) if index is None else self.records.at_index(index)
        return self._encoder.prompt(record, position, name)

    def first_prompts(self, most: int) -> list[Prompt]:
        """The training prompts of the first epoch, at most so many."""
        return [self.prompt(position) for position in range(min(most, self.records.epoch_size or most))]

    def evaluation_prompts(self) -> list[Prompt]:
        """The held-out prompts, numbered from 0 separately."""
        return [self._encoder.prompt(record, i, name) for i, (record, name) in enumerate(self.records.held_out())]

    def record(self, position: int) -> Record:
        return self.records.at(position)[0]

    def held_out_records(self) -> list[Record]:
        return [record for record, _ in self.records.held_out()]

    def first_records(self, most: int) -> list[Record]:
        """The records of the first epoch, at most so many."""
        return [self.record(position) for position in range(min(most, self.records.epoch_size or most))]

    def _check_record(self, record: Record, name: str) -> None:
        if not is_plain(record.get("prompt")):
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


def _records(
    source: PromptSource | StreamingPromptSource, *, seed: int, held_out: int, selecting: Selecting
) -> Records:
    if isinstance(source, PromptSource):
        return RecordStream(source, seed=seed, held_out=held_out, selecting=selecting)
    if not isinstance(source, StreamedMixture):
        return StreamedRecords(source, held_out=held_out, selecting=selecting)
    each = shares([weight for weight, _ in source.sources], held_out)
    parts = [
        (weight, _records(part, seed=seed, held_out=own, selecting=selecting))
        for own, (weight, part) in zip(each, source.sources, strict=True)
    ]
    return MixedRecords(parts, seed=seed)
