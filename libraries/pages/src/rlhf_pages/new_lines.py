"""Reads the lines that were appended to a file since the last read.

A reader keeps a mark: an offset and a checksum of the bytes before it. If a file was truncated and rewritten (by a
resumed run), the checksum does not match and the file is read from its start again.
"""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_BYTES = 4 * 2**20
"""Maximum number of bytes of one read. The next read returns the rest."""
_CHECKED_BYTES = 64


@dataclass(frozen=True, slots=True)
class NewLines:
    """New lines of a file."""

    lines: Sequence[Mapping[str, Any]]
    mark: str
    """Mark for the next read."""
    from_start: bool
    """Whether the lines begin at the file's start (or its newest part), not after the last read."""
    more: bool
    """Whether more lines are available immediately."""


def read_new_lines(
    path: Path,
    mark: str | None,
    known: Callable[[Mapping[str, Any]], dict[str, Any] | None],
    *,
    max_bytes: int = MAX_BYTES,
    newest_bytes: int | None = None,
) -> NewLines:
    """Read the complete lines after `mark`.

    Args:
        path: a file of JSON lines. A missing file counts as empty.
        mark: mark of the last read. None or an outdated mark reads from the start.
        known: validates a line. Lines for which it returns None, and invalid JSON, are dropped.
        max_bytes: maximum number of bytes to read.
        newest_bytes: number of bytes at the file's end to read without a valid mark. None reads from the start.

    Returns:
        The valid lines, and the mark for the next call.

    Example:
        >>> _ = Path("lines.jsonl").write_text('{"step": 1}\\n{"step": 2')
        >>> new = read_new_lines(Path("lines.jsonl"), None, dict)
        >>> new.lines, new.mark.partition("-")[0]
        ([{'step': 1}], '12')
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return NewLines([], "", True, False)
    with os.fdopen(fd, "rb") as file:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            return NewLines([], "", True, False)
        offset = _offset(fd, mark, info.st_size)
        from_start = offset is None
        start = offset or 0
        if from_start and newest_bytes is not None and info.st_size > newest_bytes:
            start = info.st_size - newest_bytes
        file.seek(start)
        content = file.read(max_bytes)
        end = content.rfind(b"\n") + 1
        if end == 0 and len(content) == max_bytes:
            end = len(content)  # skip a line that is longer than one read
        lines = [line for line in map(_parse, content[:end].split(b"\n")) if line is not None]
        valid = [line for line in map(known, lines) if line is not None]
        offset = start + end
        return NewLines(valid, _mark(fd, offset), from_start, end > 0 and info.st_size - offset > max_bytes // 64)


def _mark(fd: int, offset: int) -> str:
    start = max(0, offset - _CHECKED_BYTES)
    return f"{offset}-{zlib.crc32(os.pread(fd, offset - start, start))}"


def _offset(fd: int, mark: str | None, size: int) -> int | None:
    """Return the offset of a mark, None if the mark is invalid or outdated."""
    digits, _, _ = (mark or "").partition("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 18) or int(digits) > size:
        return None
    return int(digits) if _mark(fd, int(digits)) == mark else None


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
