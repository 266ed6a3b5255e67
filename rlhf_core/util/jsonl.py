"""JSON Lines and JSON files that survive a crash: read, cut, append, replace."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import DataError
from .atomic import write_bytes

Record = dict[str, Any]


def dump_line(record: Mapping[str, Any]) -> bytes:
    """One line, newline included. NaN and infinities raise ValueError: JSON has none."""
    return json.dumps(record, ensure_ascii=False, allow_nan=False).encode("utf-8", "surrogatepass") + b"\n"


def read_lines(path: Path) -> Iterator[Record]:
    """The whole lines of a file, without a torn last one; nothing where there is no file.

    Raises:
        DataError: a line before the last is no JSON object; names file and line.
    """
    for record, _end in _scan(path):
        yield record


def truncate_lines(path: Path, keep: Callable[[Record], bool]) -> Record | None:
    """Cut a file before the first line that `keep` refuses, and a torn last line with it.

    Returns the last line kept, None where none is. A file that is not there stays so.

    Raises:
        DataError: a line before the last is no JSON object.
    """
    if not path.exists():
        return None
    last: Record | None = None
    size = 0
    for record, end in _scan(path):
        if not keep(record):
            break
        last, size = record, end
    if path.stat().st_size != size:
        with path.open("r+b") as file:
            file.truncate(size)
            os.fsync(file.fileno())
    return last


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file, whole or not at all."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=2) + "\n"
    write_bytes(path, text.encode("utf-8", "surrogatepass"))


def _scan(path: Path) -> Iterator[tuple[Record, int]]:
    """Each whole line with the offset of its end. Only the last line may be torn."""
    if not path.exists():
        return
    torn: int | None = None
    with path.open("rb") as file:
        end = 0
        for number, line in enumerate(file, start=1):
            if torn is not None:
                raise DataError("is no JSON object", where=f"{path}:{torn}")
            end += len(line)
            record = _parse(line) if line.endswith(b"\n") else None
            if record is None:
                torn = number
            else:
                yield record, end


def _parse(line: bytes) -> Record | None:
    try:
        record = json.loads(line.decode("utf-8", "surrogatepass"))
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
