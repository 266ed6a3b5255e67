"""Which records of a source a run uses, and in which order."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b, sha256
from typing import Any, Protocol

from ..errors import DataError
from ..protocols import PromptSource
from ..util.error_text import error_text
from ..util.rng import permutation, prompt_order
from .encoder import Record

_CHUNK = 1024
"""Records encoded at once when lengths are checked."""
_TOLD_IN_FULL = 10
_EPOCHS_KEPT = 4
"""Shuffled epochs kept: several makers read before and after the end of one."""

Check = Callable[[Record, str], None]
"""Raises `DataError` on a record, called by a name, that is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRules:
    """The records that a run can use, by its checks and its filters."""

    check: Check | None = None
    fits: Callable[[Sequence[Record], Sequence[str]], Sequence[bool]] | None = None
    """Whether each of some records, called by their names, is short enough. Raises `DataError` on a wrong one."""
    measured: int | None = None
    """Number of records, spread evenly, whose length is checked; None: all."""
    skip_duplicates: bool = False
    keep: Callable[[Record], bool] | None = None

    def refuses(self, record: Record, name: str, seen: set[bytes]) -> str | None:
        """Return the filter that leaves a record out, as a key of `Records.counts`, or None. seen: prompts so far.

        Raises `DataError` if the filter fails on it.
        """
        if self.skip_duplicates:
            known = len(seen)
            seen.add(_fingerprint(record))
            if len(seen) == known:
                return "duplicates"
        try:
            return None if self.keep is None or self.keep(record) else "filtered"
        except Exception as error:  # the user's function may raise anything
            raise DataError(f"prompts.filter fails on it: {error_text(error)}", where=name) from error


class Order(Protocol):
    """An endless order of training records. It holds no record, so it can be sent to another process."""

    def index(self, position: int) -> int:
        """Return the index in the source of the record at `position` (>= 0)."""


class ShuffledEpochs:
    """An `Order` of the training records, shuffled again in each epoch."""

    def __init__(self, training: Sequence[int], seed: int) -> None:
        """training: indices in the source."""
        self._training = training
        self._seed = seed
        self._epoch = lru_cache(_EPOCHS_KEPT)(self._shuffled)

    def index(self, position: int) -> int:
        epoch, place = divmod(position, len(self._training))
        return self._training[self._epoch(epoch)[place]]

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave out the cache, which cannot be pickled."""
        return ShuffledEpochs, (self._training, self._seed)

    def _shuffled(self, epoch: int) -> array[int]:
        return array("q", prompt_order(len(self._training), self._seed, epoch))


class Records:
    """Training records by position in an endless stream, and the held-out records: those of a list.

    Some are held out, the others are shuffled again in each epoch. A record comes with its name in errors. What is at a
    position depends only on the records, the seed and the rules. Records of another kind are a subclass with a
    constructor, `at` and `held_out` of its own, and no indices.
    """

    digest: str
    """Hexadecimal SHA-256 of the records."""
    counts: Mapping[str, int]
    """`records` that were read, and how many of them each filter leaves out."""
    training: Sequence[int] | None = None
    """Indices in the source of the training records; None if their number is unknown."""
    order: Order | None = None
    """Their order, if `training` has indices."""

    def __init__(self, source: PromptSource, rules: RecordRules | None = None, *, seed: int, held_out: int = 0) -> None:
        """Read every record once. Raises one `DataError` for all wrong records, or if no training record is left."""
        self._source = source
        usable, self.counts, self.digest = _read(source, rules or RecordRules())
        if len(usable) <= held_out:
            skipped = self.counts["records"] - len(usable)
            refused = f" ({skipped} more were refused)" if skipped else ""
            raise DataError(
                f"{len(usable)} usable records{refused}, {held_out} of them to be held out: none is left to train on",
                where="prompts",
                hint="give more data, or lower eval.num_prompts" if usable else "raise prompts.max_prompt_tokens",
            )
        self._held_out = [usable[place] for place in permutation(len(usable), seed, "held-out")[:held_out]]
        kept_back = set(self._held_out)
        self.training = array("q", (index for index in usable if index not in kept_back)) if kept_back else usable
        self.order = ShuffledEpochs(self.training, seed)

    def at(self, position: int) -> tuple[Record, str]:
        """Return the training record at `position` (>= 0)."""
        assert self.order is not None
        return self.at_index(self.order.index(position))

    def at_index(self, index: int) -> tuple[Record, str]:
        """Return the record at an index of the source, if `training` has indices."""
        return self._source[index], _name(self._source, index)

    def held_out(self) -> list[tuple[Record, str]]:
        """Return the records that training never sees, always in the same order."""
        return [self.at_index(index) for index in self._held_out]


def _read(source: PromptSource, rules: RecordRules) -> tuple[Sequence[int], dict[str, int], str]:
    """Return the indices of the usable records, `Records.counts` and the digest."""
    total = len(source)
    stride = 1 if rules.measured is None else max(1, total // rules.measured)
    counts = {"records": total, "too_long": 0, "duplicates": 0, "filtered": 0}
    usable = array("q")
    wrong: dict[int, DataError] = {}
    too_long: set[int] = set()
    unmeasured: list[tuple[int, Record]] = []
    digest_of_source = getattr(source, "digest", None)
    digest, seen, check = sha256(), set[bytes](), rules.check
    filters = rules.skip_duplicates or rules.keep is not None
    # A record that is not measured is let go of at once: to keep it takes longer than to parse it.
    for index, record in enumerate(_scan(source)):
        try:
            if isinstance(record, DataError):
                raise record
            if check is not None:
                check(record, "")
            if digest_of_source is None:
                digest.update(_as_line(record))
            if filters and (reason := rules.refuses(record, _name(source, index), seen)):
                counts[reason] += 1
                continue
            usable.append(index)
            if rules.fits is not None and index % stride == 0:
                unmeasured.append((index, record))
        except DataError as error:
            wrong[index] = DataError(error.message, where=_name(source, index), hint=error.hint)
        if len(unmeasured) == _CHUNK:
            too_long |= _too_long(source, rules, unmeasured, wrong)
            unmeasured.clear()
    too_long |= _too_long(source, rules, unmeasured, wrong)
    _raise_wrong(wrong, total)
    counts["too_long"] = len(too_long)
    if too_long:
        usable = array("q", (index for index in usable if index not in too_long))
    return usable, counts, digest.hexdigest() if digest_of_source is None else digest_of_source()


def _too_long(
    source: PromptSource, rules: RecordRules, records: Sequence[tuple[int, Record]], wrong: dict[int, DataError]
) -> set[int]:
    """Return the indices of those that are too long, and add what is wrong with a record to `wrong`."""
    if rules.fits is None or not records:
        return set()
    names = [_name(source, index) for index, _ in records]
    try:
        fits = rules.fits([record for _, record in records], names)
        return {index for (index, _), each in zip(records, fits, strict=True) if not each}
    except DataError as error:
        if len(records) == 1:
            wrong[records[0][0]] = error
            return set()
    # One by one, to find all wrong records.
    return {found for each in records for found in _too_long(source, rules, [each], wrong)}


def _name(source: object, index: int) -> str:
    """Return a record's origin, for errors: the source's `describe(index)`, or its number."""
    describe = getattr(source, "describe", None)
    return str(describe(index)) if callable(describe) else f"record {index + 1}"


def _raise_wrong(errors: Mapping[int, DataError], total: int) -> None:
    """Raise the one error of a record, or one error with the numbers of all wrong records; do nothing without any."""
    if len(errors) < 2:
        for error in errors.values():
            raise error
        return
    found = [errors[index] for index in sorted(errors)]
    told = "".join(f"\n  {error.where}: {error.message}" for error in found[:_TOLD_IN_FULL])
    numbers = f"\n  all, counted from 1: {_ranges(sorted(errors))}" if len(found) > _TOLD_IN_FULL else ""
    raise DataError(
        f"{len(found)} of {total} records are wrong:{told}{numbers}",
        where="prompts",
        hint=found[0].hint,
    )


def left_out(counts: Mapping[str, int]) -> str:
    """`3 of 9 prompts are left out: too_long 2, filtered 1`; empty if all are used."""
    reasons = {reason: count for reason, count in counts.items() if reason != "records" and count}
    if not reasons:
        return ""
    told = ", ".join(f"{reason} {count:,}" for reason, count in reasons.items())
    return f"{sum(reasons.values()):,} of {counts['records']:,} prompts are left out: {told}"


def _as_line(record: Record) -> bytes:
    """Return a record as a digest reads it."""
    return json.dumps(dict(record), sort_keys=True, default=str).encode() + b"\n"


def _scan(source: PromptSource) -> Iterator[Record | DataError]:
    """Every record in order, or what is wrong with it. A source that is read faster from its beginning has `scan`."""
    if (scan := getattr(source, "scan", None)) is not None:
        yield from scan()
        return
    for index in range(len(source)):
        try:
            record = source[index]
        except DataError as error:
            yield error
            continue
        plain = isinstance(record, Mapping)
        yield record if plain else DataError(f"the record is a {type(record).__name__}, not a mapping with a `prompt`")


def _fingerprint(record: Record) -> bytes:
    """Equal for records with the same prompt."""
    prompt = record.get("prompt", record.get("messages"))
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, default=str)
    return blake2b(text.encode(), digest_size=16).digest()


def _ranges(indices: Sequence[int]) -> str:
    """`3, 7-9`, counted from 1."""
    parts: list[list[int]] = []
    for index in indices:
        if parts and parts[-1][1] == index:
            parts[-1][1] = index + 1
        else:
            parts.append([index + 1, index + 1])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
