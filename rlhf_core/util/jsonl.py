"""JSON Lines and JSON files that survive a crash: read, cut, append, replace."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from ..errors import DataError
from .files import write_bytes

Record = dict[str, Any]


def read_lines(path: Path) -> Iterator[Record]:
    """Yield the complete lines of a JSON Lines file.

    An incomplete last line is left out. A missing file is empty.

    Args:
        path: the file.

    Raises:
        DataError: a line before the last is not a JSON object. Names file and line.

    Example:
        >>> _ = Path("lines.jsonl").write_text('{"step": 1}' + chr(10) + '{"step": 2')
        >>> list(read_lines(Path("lines.jsonl")))
        [{'step': 1}]
    """
    damaged: int | None = None
    for number, (record, _end) in enumerate(_scan(path), start=1):
        if damaged is not None:
            raise DataError("is not a JSON object", where=f"{path}:{damaged}")
        if record is None:
            damaged = number
        else:
            yield record


def truncate_lines(path: Path, key: str, last: int) -> int:
    """Truncate a file before the first line whose number under `key` is above `last`, or at an incomplete last line.

    Returns the number of lines kept. A missing file is not created.

    Raises:
        DataError: a line to be kept is not a JSON object with such a number. The file is unchanged.
    """
    size = kept = damaged = 0
    for number, (record, end) in enumerate(_scan(path), start=1):
        place = None if record is None else record.get(key)
        if not isinstance(place, int):
            damaged = damaged or number
        elif place > last:
            break
        elif damaged:
            raise DataError(
                "is damaged, and the checkpoint depends on the lines after it",
                where=f"{path}:{damaged}",
                hint="resume from a checkpoint that is older than this line: --resume RUN/checkpoints/step-N",
            )
        else:
            kept, size = number, end
    if path.exists() and path.stat().st_size != size:
        with path.open("r+b") as file:
            file.truncate(size)
            os.fsync(file.fileno())
    return kept


class LineFile:
    """An append-only JSON Lines file. Use it as a context manager, or call `close`."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Write a line for each record, or nothing at all. Raises `OSError`, or `ValueError` for NaN and infinity."""
        remaining = memoryview(b"".join(map(_line, records)))
        handle = self._file.fileno()
        size = os.fstat(handle).st_size
        try:
            while remaining:
                remaining = remaining[os.write(handle, remaining) :]
        except OSError:
            with suppress(OSError):  # a device or pipe cannot be truncated
                os.ftruncate(handle, size)
            raise

    def sync(self) -> None:
        """Wait until everything written is on disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, ensure_ascii=False, allow_nan=False).encode("utf-8", "surrogatepass") + b"\n"


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file atomically.

    Args:
        path: the file.
        value: JSON values, without NaN and infinity.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=2) + "\n"
    write_bytes(path, text.encode("utf-8", "surrogatepass"))


def _scan(path: Path) -> Iterator[tuple[Record | None, int]]:
    """Yield each line, None if it is incomplete, with the offset of its end."""
    if not path.exists():
        return
    with path.open("rb") as file:
        end = 0
        for line in file:
            end += len(line)
            yield _parse(line) if line.endswith(b"\n") else None, end


def _parse(line: bytes) -> Record | None:
    try:
        record = json.loads(line.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None
