"""Reading every record of a source once: what is wrong with which, which are used, and a digest of all."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b, sha256
from typing import Protocol, runtime_checkable

from ..errors import DataError
from ..protocols import PromptSource
from ..util.error_text import error_text
from .encoder import Record

_CHUNK = 1024
"""Records encoded at once when lengths are checked."""
_TOLD_IN_FULL = 10

Check = Callable[[Record, str], None]
"""Raises `DataError` on a record, called by a name, that is wrong."""


@runtime_checkable
class ScannedSource(Protocol):
    """A source that is read faster from beginning to end than by index, and has a digest of its own."""

    def scan(self) -> Iterator[Record | DataError]:
        """Every record in order, or what is wrong with it."""
        ...

    def digest(self) -> str:
        """Hexadecimal SHA-256 of all records."""
        ...


class Records(ABC):
    """Training records by position, and the held-out ones."""

    digest: str
    counts: Mapping[str, int]
    """See `Selected.counts`."""
    epoch_size: int | None = None
    """Training records; None where their number is unknown."""

    def has_digest(self, digest: str) -> bool:
        """Whether the records are those of a digest, also of one that an earlier version took."""
        return digest == self.digest

    @abstractmethod
    def at(self, position: int) -> tuple[Record, str]:
        """The training record at `position` (>= 0) of the endless stream, and what errors call it."""

    def at_index(self, index: int) -> tuple[Record, str]:
        """The record at an index of the source, where it has one."""
        raise TypeError("a streamed source has no index")

    @abstractmethod
    def held_out(self) -> list[tuple[Record, str]]:
        """The records that training never sees, always in the same order."""


def record_name(source: object, index: int) -> str:
    """A record's origin, for errors: the source's `describe(index)`, or its number."""
    describe = getattr(source, "describe", None)
    return str(describe(index)) if callable(describe) else f"record {index + 1}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Selecting:
    """Requirements on a record."""

    check: Check | None = None
    fits: Callable[[Sequence[Record], Sequence[str]], Sequence[bool]] | None = None
    """Whether each of some records, called by their names, is short enough. Raises `DataError` on a wrong one."""
    measured: int | None = None
    """Records whose length is asked for, spread evenly; None: all."""
    skip_duplicates: bool = False
    keep: Callable[[Record], bool] | None = None

    def refuses(self, record: Record, name: str, seen: set[bytes]) -> str | None:
        """By which of `counts` the filters leave a record out; None where they keep it. seen: prompts so far.

        Raises `DataError` where the filter fails on it.
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


def raise_wrong(errors: Mapping[int, DataError], total: int) -> None:
    """Raise the one error of a record, or one that gives the numbers of all; nothing where there is none."""
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


class Selected:
    """The records of a source that are used, found by reading every record once."""

    def __init__(self, source: PromptSource, selecting: Selecting) -> None:
        """Raises one `DataError` that names all wrong records."""
        self._source = source
        self._selecting = selecting
        total = len(source)
        stride = 1 if selecting.measured is None else max(1, total // selecting.measured)
        self._stride = stride if selecting.fits is not None else total + 1
        self._wrong: dict[int, DataError] = {}
        self._measured: list[tuple[int, Record]] = []
        self._too_long: set[int] = set()
        self.counts = {"records": total, "too_long": 0, "duplicates": 0, "filtered": 0}
        """`records`, and those of them left out by reason."""
        self.usable: Sequence[int] = array("q", self._choose())
        """Their indices in the source."""
        self._measure()
        raise_wrong(self._wrong, total)
        if self._too_long:
            self.counts["too_long"] = len(self._too_long)
            self.usable = array("q", (index for index in self.usable if index not in self._too_long))

    def _choose(self) -> Iterator[int]:
        """The records that the filters keep; now and then some are measured."""
        # Records are let go of at once where they are not measured: to keep them takes longer than to parse them.
        source, selecting, seen = self._source, self._selecting, set[bytes]()
        filters = selecting.skip_duplicates or selecting.keep is not None
        check = selecting.check
        scanned = source if isinstance(source, ScannedSource) else None
        digest = sha256()
        for index, record in enumerate(scan(source)):
            try:
                if isinstance(record, DataError):
                    raise record
                if check is not None:
                    check(record, "")
                if scanned is None:
                    digest.update(as_line(record))
                if filters and (reason := selecting.refuses(record, record_name(source, index), seen)):
                    self.counts[reason] += 1
                    continue
                yield index
                if index % self._stride == 0:
                    self._measured.append((index, record))
                    if len(self._measured) >= _CHUNK:
                        self._measure()
            except DataError as error:
                self._wrong[index] = DataError(error.message, where=record_name(source, index), hint=error.hint)
        self.digest = digest.hexdigest() if scanned is None else scanned.digest()

    def _measure(self) -> None:
        ask, records = self._selecting.fits, self._measured
        if ask is None or not records:
            return
        names = [record_name(self._source, index) for index, _ in records]
        try:
            fits = list(ask([record for _, record in records], names))
        except DataError:  # one by one, to find them all
            fits = []
            for name, (index, record) in zip(names, records, strict=True):
                try:
                    fits += ask([record], [name])
                except DataError as error:
                    self._wrong[index] = error
                    fits.append(True)
        self._too_long |= {index for (index, _), each in zip(records, fits, strict=True) if not each}
        self._measured = []


def left_out(counts: Mapping[str, int]) -> str:
    """`3 of 9 prompts are left out: too_long 2, filtered 1`; empty where all are used."""
    reasons = {reason: count for reason, count in counts.items() if reason != "records" and count}
    if not reasons:
        return ""
    told = ", ".join(f"{reason} {count:,}" for reason, count in reasons.items())
    return f"{sum(reasons.values()):,} of {counts['records']:,} prompts are left out: {told}"


def records_digest(source: PromptSource) -> str:
    """Hexadecimal SHA-256 of what all records say, however they are written down."""
    digest = sha256()
    for record in scan(source):
        if not isinstance(record, DataError):
            digest.update(as_line(record))
    return digest.hexdigest()


def as_line(record: Record) -> bytes:
    """What a digest is taken of."""
    return json.dumps(dict(record), sort_keys=True, default=str).encode() + b"\n"


def scan(source: PromptSource) -> Iterator[Record | DataError]:
    """Every record in order, or what is wrong with it."""
    if isinstance(source, ScannedSource):
        yield from source.scan()
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
