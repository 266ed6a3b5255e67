"""Selection of the records that a run uses: checks, filters, and errors of wrong records."""

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
"""Number of records encoded at once when lengths are checked."""
_MAX_SHOWN = 10
"""Maximum number of wrong records whose error is shown in full."""

Check = Callable[[Record, str], None]
"""Raises `DataError` for a wrong record. The second argument is its name in errors."""


@dataclass(frozen=True, slots=True)
class RecordRules:
    """Checks and filters that select the records of a run, and their encoder."""

    encoder: PromptEncoder
    """Encodes records to prompts."""
    _: KW_ONLY
    max_prompt_tokens: int | None = None
    """Maximum length of a prompt in tokens. None if unlimited."""
    too_long: Literal["skip", "error"] = "skip"
    """Whether longer prompts are skipped or are an error."""
    may_be_empty: bool = False
    """Whether to allow prompts without tokens, for which an environment provides the first text."""
    skip_duplicates: bool = False
    """Whether to skip records whose prompt occurred before."""
    keep: Callable[[Record], bool] | None = None
    """Returns whether to use a record. None uses all."""
    check: Check | None = None
    """Additional check of every record."""
    measured: int | None = None
    """Number of records, evenly spaced, whose length is checked. None checks all, which a training run needs."""

    def verify(self, record: Record, name: str) -> None:
        """Raise `DataError` for a record that is not a prompt or fails `check`, without encoding it."""
        if not (prompt_of(record, name) or self.may_be_empty):
            raise DataError("the prompt is empty", where=name)
        if self.check is not None:
            self.check(record, name)

    def refuses(self, record: Record, name: str, seen: set[bytes]) -> str | None:
        """Return the filter that rejects a record, as a key of `PromptStream.counts`, or None if it is kept.

        `seen` contains fingerprints of the prompts so far, and is updated. Raises `DataError` if the filter fails.
        """
        if self.skip_duplicates:
            known = len(seen)
            seen.add(_fingerprint(record))
            if len(seen) == known:
                return "duplicates"
        try:
            return None if self.keep is None or self.keep(record) else "filtered"
        except Exception as error:  # the user's function may raise anything
            raise DataError(f"prompts.filter failed: {error_text(error)}", where=name) from error

    def fits(self, records: Sequence[Record], names: Sequence[str]) -> list[bool]:
        """Whether each record is short enough. Raises `DataError` for a wrong record."""
        lengths = self.encoder.lengths(records, names)
        if 0 in lengths and not self.may_be_empty:
            raise DataError("the prompt encodes to 0 tokens", where=names[lengths.index(0)])
        limit = self.max_prompt_tokens
        if limit is None:
            return [True] * len(records)
        fits = [length <= limit for length in lengths]
        if self.too_long == "error" and not all(fits):
            worst = fits.index(False)
            raise DataError(
                f"the prompt has {lengths[worst]} tokens, more than max_prompt_tokens ({limit})",
                where=names[worst],
                hint="raise prompts.max_prompt_tokens, or set prompts.too_long: skip",
            )
        return fits


def read_records(source: PromptSource, rules: RecordRules) -> tuple[Sequence[int], dict[str, int], str]:
    """Read every record once, and return the indices of usable ones, `PromptStream.counts` and the digest.

    Raises a single `DataError` for all wrong records.
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
    # Records that are not measured are released at once, since keeping them takes longer than parsing them.
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
    """Return the indices of records that are too long, and add errors to `wrong`."""
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
    return {index for each in records for index in _too_long(source, rules, [each], wrong)}


def name_of(source: object, index: int) -> str:
    """Return the name of a record in errors: the source's `describe(index)`, or its number."""
    describe = getattr(source, "describe", None)
    return str(describe(index)) if callable(describe) else f"record {index + 1}"


def _raise_wrong(errors: Mapping[int, DataError], total: int) -> None:
    """Raise a single error directly, or one error that lists all wrong records. Does nothing without errors."""
    if len(errors) < 2:
        for error in errors.values():
            raise error
        return
    ordered = [errors[index] for index in sorted(errors)]
    shown = "".join(f"\n  {error.where}: {error.message}" for error in ordered[:_MAX_SHOWN])
    numbers = f"\n  all, counted from 1: {_ranges(sorted(errors))}" if len(ordered) > _MAX_SHOWN else ""
    raise DataError(
        f"{len(ordered)} of {total} records are wrong:{shown}{numbers}",
        where="prompts",
        hint=ordered[0].hint,
    )


def left_out(counts: Mapping[str, int]) -> str:
    """Describe the skipped records. Empty if all are used.

    Example:
        >>> left_out({"records": 9, "too_long": 2, "duplicates": 0, "filtered": 1})
        '3 of 9 prompts are left out: too_long 2, filtered 1'
    """
    reasons = {reason: count for reason, count in counts.items() if reason != "records" and count}
    if not reasons:
        return ""
    detail = ", ".join(f"{reason} {count:,}" for reason, count in reasons.items())
    return f"{sum(reasons.values()):,} of {counts['records']:,} prompts are left out: {detail}"


def _as_line(record: Record) -> bytes:
    """Return a record as bytes for the digest."""
    return json.dumps(dict(record), sort_keys=True, default=str).encode() + b"\n"


def _scan(source: PromptSource) -> Iterator[Record | DataError]:
    """Yield every record in order, or its error. Uses `scan` of a source that reads faster in order."""
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
    """Return a hash that is equal for records with the same prompt."""
    prompt = record.get("prompt", record.get("messages"))
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, default=str)
    return blake2b(text.encode(), digest_size=16).digest()


def _ranges(indices: Sequence[int]) -> str:
    """Format sorted indices, counted from 1: [2, 6, 7, 8] -> `3, 7-9`."""
    parts: list[list[int]] = []
    for index in indices:
        if parts and parts[-1][1] == index:
            parts[-1][1] = index + 1
        else:
            parts.append([index + 1, index + 1])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
