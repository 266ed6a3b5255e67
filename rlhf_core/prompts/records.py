"""Reading every record of a source once: what is wrong with which, which are used, and a digest of all."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b, sha256
from itertools import islice
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
    """What is asked of a record."""

    check: Check | None = None
    fits: Fits | None = None
    measured: int | None = None
    """Records whose length is asked for, spread evenly; None: all."""
    skip_duplicates: bool = False
    keep: Callable[[Record], bool] | None = None


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

    source: object
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
    wrong = Wrong(source)
    usable = array("q")
    counts = dict.fromkeys(("records", "too_long", "duplicates", "filtered"), 0)
    total = len(source)
    stride = 1 if selecting.measured is None else max(1, total // selecting.measured)
    digest = None if isinstance(source, ScannedSource) else sha256()
    choice = _Choice(selecting, source, wrong, counts)
    numbered = enumerate(scan(source))
    while chunk := list(islice(numbered, _CHUNK)):
        right: list[tuple[int, Record]] = []
        for index, record in chunk:
            if isinstance(record, DataError):
                wrong.errors[index] = record
                continue
            if digest is not None:
                digest.update(json.dumps(dict(record), sort_keys=True, default=str).encode() + b"\n")
            if choice.takes(index, record):
                right.append((index, record))
        usable.extend(choice.fitting(right, stride))
        counts["records"] += len(chunk)
    wrong.raise_if_any(total)
    return Selected(usable, source.digest() if digest is None else digest.hexdigest(), counts)  # type: ignore[attr-defined]


def scan(source: PromptSource) -> Iterator[Record | DataError]:
    """Every record in order, or what is wrong with it."""
    if isinstance(source, ScannedSource):
        yield from source.scan()
        return
    for index in range(len(source)):
        try:
            yield source[index]
        except DataError as error:
            yield error


class _Choice:
    """Decides on one record after the other, and counts why it left some out."""

    def __init__(self, selecting: Selecting, source: object, wrong: Wrong, counts: dict[str, int]) -> None:
        self._selecting = selecting
        self._source = source
        self._wrong = wrong
        self._counts = counts
        self._seen: set[bytes] = set()

    def takes(self, index: int, record: Record) -> bool:
        """Check the shape of a record, and ask the filters."""
        asked = self._selecting
        if asked.check is not None:
            try:
                asked.check(record, "")
            except DataError as error:
                name = record_name(self._source, index)
                self._wrong.errors[index] = DataError(error.message, where=name, hint=error.hint)
                return False
        if asked.skip_duplicates:
            key = fingerprint(record)
            if key in self._seen:
                self._counts["duplicates"] += 1
                return False
            self._seen.add(key)
        if asked.keep is not None and not asked.keep(record):
            self._counts["filtered"] += 1
            return False
        return True

    def fitting(self, records: Sequence[tuple[int, Record]], stride: int) -> Iterable[int]:
        """Those that are short enough; only every `stride`-th is measured."""
        measured = [(index, record) for index, record in records if index % stride == 0]
        fits = dict(zip((index for index, _ in measured), self._measure(measured), strict=True))
        self._counts["too_long"] += sum(not each for each in fits.values())
        return [index for index, _ in records if fits.get(index, True)]

    def _measure(self, records: Sequence[tuple[int, Record]]) -> Sequence[bool]:
        ask = self._selecting.fits
        if ask is None or not records:
            return [True] * len(records)
        names = [record_name(self._source, index) for index, _ in records]
        try:
            return ask([record for _, record in records], names)
        except DataError:  # one by one, to find them all
            found: list[bool] = []
            for name, (index, record) in zip(names, records, strict=True):
                try:
                    found += ask([record], [name])
                except DataError as error:
                    self._wrong.errors[index] = error
                    found.append(True)
            return found


def fingerprint(record: Record) -> bytes:
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
