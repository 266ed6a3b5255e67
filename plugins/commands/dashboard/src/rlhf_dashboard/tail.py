"""Reads what a file of lines has gained since the last look.

A reader keeps a mark: an offset, and a checksum of the bytes before it. A file that was cut and written anew (a resumed
run) no longer has those bytes there, and is read from its start again.
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
"""Most bytes of one look; the rest comes with the next."""
_CHECKED = 64


@dataclass(frozen=True, slots=True)
class Gained:
    """New lines of a file."""

    lines: Sequence[Mapping[str, Any]]
    mark: str
    """To be given at the next look."""
    anew: bool
    """Whether the lines begin at the file's start (or its newest part), not after the last look."""
    more: bool
    """Whether the next look will find more at once."""


def gained(
    path: Path,
    mark: str | None,
    known: Callable[[Mapping[str, Any]], dict[str, Any] | None],
    *,
    max_bytes: int = MAX_BYTES,
    newest_bytes: int | None = None,
) -> Gained:
    """The lines after `mark`, each as `known` gives it back; those it refuses, and torn ones, are left out.

    newest_bytes: without a valid mark, how much of the file's end is read; None reads from the start.
    """
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return Gained([], "", True, False)
    with os.fdopen(opened, "rb") as file:
        found = os.fstat(opened)
        if not stat.S_ISREG(found.st_mode):
            return Gained([], "", True, False)
        offset = _offset(opened, mark, found.st_size)
        anew = offset is None
        start = offset or 0
        if anew and newest_bytes is not None and found.st_size > newest_bytes:
            start = found.st_size - newest_bytes
        file.seek(start)
        content = file.read(max_bytes)
        end = content.rfind(b"\n") + 1
        if end == 0 and len(content) == max_bytes:
            end = len(content)  # a line longer than one look: it is skipped
        lines = [line for line in map(_parsed, content[:end].split(b"\n")) if line is not None]
        shown = [line for line in map(known, lines) if line is not None]
        offset = start + end
        return Gained(shown, _mark(opened, offset), anew, end > 0 and found.st_size - offset > max_bytes // 64)


def _mark(opened: int, offset: int) -> str:
    start = max(0, offset - _CHECKED)
    return f"{offset}-{zlib.crc32(os.pread(opened, offset - start, start))}"


def _offset(opened: int, mark: str | None, size: int) -> int | None:
    """The offset of a mark that still holds."""
    digits, _, _ = (mark or "").partition("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 18) or int(digits) > size:
        return None
    return int(digits) if _mark(opened, int(digits)) == mark else None


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
