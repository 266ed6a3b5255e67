"""The endless, reproducible stream of encoded prompts that a run trains on."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

from ..errors import DataError, PluginError
from ..protocols import PromptSource
from ..types import Prompt
from ..util.rng import permutation, prompt_order
from .encoder import PromptEncoder as PromptEncoder
from .encoder import Record
from .records import RecordRules, name_of, read_records

_EPOCHS_KEPT = 4
"""Number of shuffled epochs in the cache, since several makers read before and after the end of one."""


class Order(Protocol):
    """An endless order of training records. It contains only indices, so that it can be sent to another process."""

    def index(self, position: int) -> int:
        """Return the index in the source of the record at `position` (>= 0)."""


class ShuffledEpochs:
    """An `Order` of the training records, shuffled again in each epoch."""

    def __init__(self, training: Sequence[int], seed: int) -> None:
        """Shuffle the epochs on demand. `training`: indices of the training records in the source."""
        self._training = training
        self._seed = seed
        self._epoch = lru_cache(_EPOCHS_KEPT)(self._shuffled)

    def index(self, position: int) -> int:
        epoch, place = divmod(position, len(self._training))
        return self._training[self._epoch(epoch)[place]]

    def __reduce__(self) -> tuple[Any, ...]:
        """Omit the cache, which cannot be pickled."""
        return ShuffledEpochs, (self._training, self._seed)

    def _shuffled(self, epoch: int) -> array[int]:
        return array("q", prompt_order(len(self._training), self._seed, epoch))


class PromptStream:
    """An endless stream of encoded prompts, and a fixed list of held-out prompts for evaluation.

    The training records are shuffled again in each epoch. The record at a position depends only on the records, the
    seed and the rules, unless a sampler draws it. Records of another kind use a subclass with its own constructor, `at`
    and `held_out`, and without indices.

    Example:
        rules = RecordRules(PromptEncoder(tokenizer), max_prompt_tokens=512)
        stream = PromptStream.of([{"prompt": "1+1="}, {"prompt": "2+2="}], rules, seed=0, held_out=1)
        prompts = [stream.prompt(position) for position in range(8)]
        held_out = stream.evaluation_prompts()
    """

    digest: str
    """Hexadecimal SHA-256 of the records."""
    counts: Mapping[str, int]
    """`records` that were read, and the number that each filter skipped."""
    training: Sequence[int] | None = None
    """Indices of the training records in the source. None if their number is unknown."""
    order: Order | None = None
    """Order of the training records, if `training` has indices."""

    @staticmethod
    def of(source: Any, rules: RecordRules, *, seed: int, held_out: int = 0) -> PromptStream:
        """Return the stream of a source, which may define its own order by `make_stream` (docs/kinds/prompts.md)."""
        if (make_stream := getattr(source, "make_stream", None)) is not None:
            stream: PromptStream = make_stream(rules, seed=seed, held_out=held_out)
            return stream
        if isinstance(source, PromptSource):
            return PromptStream(source, rules, seed=seed, held_out=held_out)
        raise PluginError(
            f"a {type(source).__name__} lacks a length, so its records cannot be ordered",
            where="prompts",
            hint="make it a source of a mixture (docs/data.md), or give it a method make_stream",
        )

    def __init__(self, source: PromptSource, rules: RecordRules, *, seed: int, held_out: int = 0) -> None:
        """Read every record once. Raises a single `DataError` for all wrong records, or without training records.

        Args:
            source: The records.
            rules: Checks, filters and encoder.
            seed: Seed of the order and of the choice of held-out records.
            held_out: Number of records to hold out for evaluation.
        """
        self.encoder = rules.encoder
        self._source = source
        usable, self.counts, self.digest = read_records(source, rules)
        if len(usable) <= held_out:
            skipped = self.counts["records"] - len(usable)
            refused = f" ({skipped} more were refused)" if skipped else ""
            raise DataError(
                f"{len(usable)} usable records{refused}, {held_out} of them held out, leave none to train on",
                where="prompts",
                hint="give more data, or lower eval.num_prompts" if usable else "raise prompts.max_prompt_tokens",
            )
        self._held_out = [usable[place] for place in permutation(len(usable), seed, "held-out")[:held_out]]
        excluded = set(self._held_out)
        self.training = array("q", (index for index in usable if index not in excluded)) if excluded else usable
        self.order = ShuffledEpochs(self.training, seed)

    def __len__(self) -> int:
        """Return the number of training prompts of one epoch. Raises `TypeError` if it is unknown."""
        if self.training is None:
            raise TypeError("the length of a streamed source is unknown")
        return len(self.training)

    def at(self, position: int) -> tuple[Record, str]:
        """Return the training record at `position` (>= 0) of the endless stream, and its name in errors."""
        assert self.order is not None
        return self.at_index(self.order.index(position))

    def at_index(self, index: int) -> tuple[Record, str]:
        """Return the record at an index of the source, and its name in errors. Requires indices in `training`."""
        return self._source[index], name_of(self._source, index)

    def held_out(self) -> list[tuple[Record, str]]:
        """Return the records that training never sees, always in the same order."""
        return [self.at_index(index) for index in self._held_out]

    def prompt(self, position: int, index: int | None = None) -> Prompt:
        """Return the training prompt at `position` (>= 0) of the endless stream.

        `index`: the record's index in the source, if a sampler has drawn it.
        """
        record, name = self.at(position) if index is None else self.at_index(index)
        return self.encoder.prompt(record, position, name)

    def record(self, position: int) -> Record:
        """Return the training record at `position` (>= 0) of the endless stream."""
        return self.at(position)[0]

    def evaluation_prompts(self, first: int | None = None) -> list[Prompt]:
        """Return the held-out prompts with positions from 0. `first`: instead, this many of the first epoch."""
        return [self.encoder.prompt(record, i, name) for i, (record, name) in enumerate(self._evaluated(first))]

    def evaluation_records(self, first: int | None = None) -> list[Record]:
        """Return the records of `evaluation_prompts`."""
        return [record for record, _ in self._evaluated(first)]

    def _evaluated(self, first: int | None) -> list[tuple[Record, str]]:
        if first is None:
            return self.held_out()
        return [self.at(i) for i in range(first if self.training is None else min(first, len(self.training)))]
