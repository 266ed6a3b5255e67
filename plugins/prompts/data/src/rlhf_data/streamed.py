"""Records of sources of unknown length: one source read from its beginning, or several in turn."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import islice
from typing import Any

from rlhf_core.errors import DataError
from rlhf_core.prompts import PromptStream, RecordRules

from .order import Turns

Record = Mapping[str, Any]
_NUM_CHECKED = 1024
"""Number of records that are checked before a run starts, and hashed for the digest."""
_NUM_CACHED = 4096
"""Number of newest records cached, so that a repeated prompt is not read again."""


def origin(source: object, index: int) -> str:
    """Name of a record in error messages: the source's `describe(index)`, or the record's number."""
    describe = getattr(source, "describe", None)
    return str(describe(index)) if callable(describe) else f"record {index + 1}"


class StreamedRecords(PromptStream):
    """Records in the order of the source, which restarts at its end. Its first records are held out.

    The position of a run is its cursor. A process that starts later, such as after a resume, reads up to it, so a
    source must yield the same records each time.
    """

    def __init__(self, source: Iterable[Record], rules: RecordRules, *, held_out: int) -> None:
        """Read the held-out records and check the first ones. Raise `DataError` if one is wrong."""
        self.encoder = rules.encoder
        self._stream = source
        self._rules = rules
        self._num_held_out = held_out
        self.counts = {}
        digest = sha256()
        wrong: list[DataError] = []
        count = 0
        for index, record in enumerate(islice(iter(source), held_out + _NUM_CHECKED)):
            count += 1
            digest.update(json.dumps(dict(record), sort_keys=True, default=str).encode() + b"\n")
            try:
                self._usable(index, record, set())
            except DataError as error:
                wrong.append(error)
        if wrong:
            more = f" (and {len(wrong) - 1} more of the first {count} records)" if len(wrong) > 1 else ""
            raise DataError(f"{wrong[0].message}{more}", where=wrong[0].where, hint=wrong[0].hint)
        self.digest = digest.hexdigest()
        self._recent: OrderedDict[int, tuple[Record, str]] = OrderedDict()
        self._restart()
        self._first_records = list(islice(self._epoch(), held_out))
        if len(self._first_records) < held_out:
            raise DataError(f"only {len(self._first_records)} of {held_out} held-out records exist", where="prompts")
        self.at(0)

    def at(self, position: int) -> tuple[Record, str]:
        if position in self._recent:
            return self._recent[position]
        if position < self._next:
            self._restart()
        while self._next <= position:
            self._recent[self._next] = next(self._training)
            self._next += 1
            if len(self._recent) > _NUM_CACHED:
                self._recent.popitem(last=False)
        return self._recent[position]

    def held_out(self) -> list[tuple[Record, str]]:
        return list(self._first_records)

    def _restart(self) -> None:
        self._next = 0
        self._training = self._endless()
        self._recent.clear()

    def _endless(self) -> Iterator[tuple[Record, str]]:
        while True:
            read = 0
            for record in islice(self._epoch(), self._num_held_out, None):
                read += 1
                yield record
            if not read:
                raise DataError("all records are held out or dropped", where="prompts", hint="provide more data")

    def _epoch(self) -> Iterator[tuple[Record, str]]:
        """Yield the usable records once."""
        seen: set[bytes] = set()
        for index, record in enumerate(self._stream):
            if self._usable(index, record, seen):
                yield record, origin(self._stream, index)

    def _usable(self, index: int, record: Record, seen: set[bytes]) -> bool:
        rules, name = self._rules, origin(self._stream, index)
        rules.verify(record, name)
        return not rules.refuses(record, name, seen) and rules.fits([record], [name])[0]


class MixedRecords(PromptStream):
    """Parts that take turns by their weights, some of unknown length.

    A position determines the part whose turn it is, and the number of its earlier turns, which is the part's cursor.
    """

    def __init__(self, parts: Sequence[tuple[float, PromptStream]], *, seed: int) -> None:
        """Combine `parts`: weight and records of each."""
        self._parts = [records for _, records in parts]
        self.encoder = self._parts[0].encoder
        self._turns = Turns(seed, [weight for weight, _ in parts])
        self.digest = sha256("".join(part.digest for part in self._parts).encode()).hexdigest()
        counts: Counter[str] = Counter()
        for part in self._parts:
            counts.update(part.counts)
        self.counts = dict(counts)

    def at(self, position: int) -> tuple[Record, str]:
        part, turn = self._turns.at(position)
        return self._parts[part].at(turn)

    def held_out(self) -> list[tuple[Record, str]]:
        return [record for part in self._parts for record in part.held_out()]
