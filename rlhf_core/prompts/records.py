"""Which records of a source a run uses: its checks, its filters, and what is wrong with them."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from hashlib import blake2b, sha256
from typing import Literal

from ..errors import DataError
from ..protocols import PromptSource
from ..util.error_text import error_text
from .encoder import PromptEncoder, Record, prompt_of

_CHUNK = 1024
"""Records encoded at once when lengths are checked."""
_TOLD_IN_FULL = 10

Check = Callable[[Record, str], None]
"""Raises `DataError` on a record, called by a name, that is wrong."""


@dataclass(frozen=True, slots=True)
class RecordRules:
    """The records that a run can use, by its checks and its filters, and what encodes them."""

    encoder: PromptEncoder
    _: KW_ONLY
    max_prompt_tokens: int | None = None
    too_long: Literal["skip", "error"] = "skip"
    may_be_empty: bool = False
    """Allow prompts without tokens, for which an environment gives the first text."""
    skip_duplicates: bool = False
    keep: Callable[[Record], bool] | None = None
    """The records to use."""
    check: Check | None = None
    """Further check of every record."""
    measured: int | None = None
    """Number of records, spread evenly, whose length is checked; None: all. With it, good for a check only."""

    def verify(self, record: Record, name: str) -> None:
        """Raise `DataError` on a record, called by a name, that is no prompt or fails `check`. Nothing is encoded."""
        if not (prompt_of(record, name) or self.may_be_empty):
            raise DataError("the prompt encodes to no tokens: it is empty", where=name)
        if self.check is not None:
            self.check(record, name)

    def refuses(self, record: Record, name: str, seen: set[bytes]) -> str | None:
        """Return the filter that leaves a record out, as a key of `PromptStream.counts`, or None. seen: prompts so far.

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

    def fits(self, records: Sequence[Record], names: Sequence[str]) -> list[bool]:
        """Whether each of some records, called by their names, is short enough. Raises `DataError` on a wrong one."""
        lengths = self.encoder.lengths(records, names)
        if 0 in lengths and not self.may_be_empty:
            raise DataError("the prompt encodes to no tokens", where=names[lengths.index(0)])
        limit = self.max_prompt_tokens
        if limit is None:
            return [True] * len(records)
        fits = [length <= limit for length in lengths]
        if self.too_long == "error" and not all(fits):
            worst = fits.index(False)
            raise DataError(
                f"the prompt has {lengths[worst]} tokens, more than max_prompt_tokens ({limit})",
                where=names[worst],
                hint="raise prompts.max_prompt_tokens, or say prompts.too_long: skip",
            )
        return fits


def read_records(source: PromptSource, rules: RecordRules) -> tuple[Sequence[int], dict[str, int], str]:
    """Read every record once; return the indices of the usable ones, `PromptStream.counts` and the digest.

    Raises one `DataError` for all wrong records.
    """
    total = len(source)
    stride = 1 if rules.measured is None else max(1, total // rules.measured)
    counts = {"records": total, "too_long": 0, "duplicates": 0, "filtered": 0}
    usable = array("q")
    wrong: dict[int, DataError] = {}
    too_long: set[int] = set()
    unmeasured: list[tuple[int, Record]] = []
    digest_of_source = getattr(source, "digest", None)
    digest, seen = sha256(), set[bytes]()
    filters = rules.skip_duplicates or rules.keep is not None
    # A record that is not measured is let go of at once: to keep it takes longer than to parse it.
    for index, record in enumerate(_scan(source)):
        try:
            if isinstance(record, DataError):
                raise record
            rules.verify(record, "")
            if digest_of_source is None:
                digest.update(_as_line(record))
            if filters and (reason := rules.refuses(record, name_of(source, index), seen)):
                counts[reason] += 1
                continue
            usable.append(index)
            if index % stride == 0:
                unmeasured.append((index, record))
        except DataError as error:
            wrong[index] = DataError(error.message, where=name_of(source, index), hint=error.hint)
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
    if not records:
        return set()
    names = [name_of(source, index) for index, _ in records]
    try:
        fits = rules.fits([record for _, record in records], names)
        return {index for (index, _), each in zip(records, fits, strict=True) if not each}
    except DataError as error:
        if len(records) == 1:
            wrong[records[0][0]] = error
            return set()
    # One by one, to find all wrong records.
    return {found for each in records for found in _too_long(source, rules, [each], wrong)}


def name_of(source: object, index: int) -> str:
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
