"""Reading every record of a source once: what is wrong with which, which are used, and a digest of all."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b, sha256
from typing import Protocol, runtime_checkable

from ..errors import DataError
from ..protocols import PromptSource
from .encoder import Record

_CHUNK = 1024
"""Records encoded at once when lengths are checked."""
_TOLD_IN_FULL = 10

Check = Callable[[Record, str], None]
"""Raises `DataError` on a record, called by a name, that is wrong."""
Fits = Callable[[Sequence[Record], Sequence[str]], Sequence[bool]]
"""Whether each of some records, called by their names, is short enough. Raises `DataError` on a wrong one."""


@runtime_checkable
class ScannedSource(Protocol):
    """A source that is read faster from beginning to end than by index, and has a digest of its own."""

    def scan(self) -> Iterator[Record | DataError]:
        """Every record in order, or what is wrong with it."""
        ...

    def digest(self) -> str:
        """Hexadecimal SHA-256 of all records."""
        ...


def record_name(source: object, index: int) -> str:
    """A record's origin, for errors: the source's `describe(index)`, or its number."""
    describe = getattr(source, "describe", None)
    return str(describe(index)) if callable(describe) else f"record {index + 1}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Selecting:
    """Requirements on a record."""

    check: Check | None = None
    fits: Fits | None = None
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
            raise DataError(f"prompts.filter fails on it: {type(error).__name__}: {error}", where=name) from error


@dataclass(frozen=True, slots=True)
class Selected:
    """The records of a source that are used."""

    usable: Sequence[int]
    digest: str
    counts: Mapping[str, int]
    """`records`, and those of them left out by reason: `too_long`, `duplicates`, `filtered`."""


@dataclass(slots=True)
class Wrong:
    """Wrong records, collected so that all are told at once."""

    errors: dict[int, DataError] = field(default_factory=dict)

    def raise_if_any(self, total: int) -> None:
        """Raise the one error, or one that gives the numbers of all."""
        if not self.errors:
            return
        if len(self.errors) == 1:
            raise next(iter(self.errors.values()))
        found = [self.errors[index] for index in sorted(self.errors)]
        told = "".join(f"\n  {error.where}: {error.message}" for error in found[:_TOLD_IN_FULL])
        numbers = f"\n  all, counted from 1: {_ranges(sorted(self.errors))}" if len(found) > _TOLD_IN_FULL else ""
        raise DataError(
            f"{len(found)} of {total} records are wrong:{told}{numbers}",
            where="prompts",
            hint=found[0].hint,
        )


def select_records(source: PromptSource, selecting: Selecting) -> Selected:
    """Read every record once. Raises one `DataError` that names all wrong records."""
    own_digest = isinstance(source, ScannedSource)
    digest = sha256()
    total = len(source)
    choice = _Choice(source, selecting, total)
    # Records are let go of at once where they are not measured: to keep them takes longer than to parse them.
    check, look_at = selecting.check, choice.look_at
    for index, record in enumerate(scan(source)):
        try:
            if isinstance(record, DataError):
                raise record
            if check is not None:
                check(record, "")
            if not own_digest:
                digest.update(as_line(record))
            look_at(index, record)
        except DataError as error:
            choice.refuse(index, error)
    usable = choice.finish()
    counts = {"records": total, **choice.counts}
    return Selected(usable, source.digest() if isinstance(source, ScannedSource) else digest.hexdigest(), counts)


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
    return source.scan() if isinstance(source, ScannedSource) else _read_each(source)


def _read_each(source: PromptSource) -> Iterator[Record | DataError]:
    for index in range(len(source)):
        try:
            yield source[index]
        except DataError as error:
            yield error


class _Choice:
    """Decides on one record after the other, and counts why it left some out."""

    def __init__(self, source: PromptSource, selecting: Selecting, total: int) -> None:
        self._source = source
        self._total = total
        self._selecting = selecting
        self._filters = selecting.skip_duplicates or selecting.keep is not None
        stride = 1 if selecting.measured is None else max(1, total // selecting.measured)
        self._stride = stride if selecting.fits is not None else total + 1
        self._wrong = Wrong()
        self._seen: set[bytes] = set()
        self._usable = array("q")
        self._measured: list[tuple[int, Record]] = []
        self._too_long: set[int] = set()
        self.counts = dict.fromkeys(("too_long", "duplicates", "filtered"), 0)

    def refuse(self, index: int, error: DataError) -> None:
        """Note a wrong record."""
        name = record_name(self._source, index)
        self._wrong.errors[index] = DataError(error.message, where=name, hint=error.hint)

    def look_at(self, index: int, record: Record) -> None:
        """Ask the filters, and now and then measure some."""
        name = record_name(self._source, index) if self._filters else ""
        if self._filters and (reason := self._selecting.refuses(record, name, self._seen)):
            self.counts[reason] += 1
            return
        self._usable.append(index)
        if index % self._stride == 0:
            self._measured.append((index, record))
            if len(self._measured) >= _CHUNK:
                self._measure()

    def finish(self) -> Sequence[int]:
        """The indices of the records to use. Raises `DataError` where some are wrong."""
        self._measure()
        self._wrong.raise_if_any(self._total)
        self.counts["too_long"] = len(self._too_long)
        if not self._too_long:
            return self._usable
        return array("q", (index for index in self._usable if index not in self._too_long))

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
                    self._wrong.errors[index] = error
                    fits.append(True)
        self._too_long |= {index for (index, _), each in zip(records, fits, strict=True) if not each}
        self._measured = []


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
