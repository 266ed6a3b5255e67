"""Files: replaced atomically, and opened safely in folders that others may write to."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside `path` to write to; it is synced and renamed over `path`, or removed on error."""
    beside = path.with_name(f".{path.name}.tmp")
    beside.unlink(missing_ok=True)  # what a kill left; a link would be followed
    try:
        yield beside
        with beside.open("rb") as file:
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file atomically by one with `content`."""
    with replacing(path) as beside:
        beside.write_bytes(content)


def oddity(path: Path, *, is_folder: bool = False) -> str | None:
    """Name of what is in the place of a regular file (or folder); None if it is one, or is missing."""
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    if stat.S_ISDIR(mode):
        return None if is_folder else "is a folder, not a file"
    if stat.S_ISREG(mode):
        return "is a file, not a folder" if is_folder else None
    return "is a symbolic link" if stat.S_ISLNK(mode) else "is a pipe, socket or device, not a file"


def is_own_file(path: Path) -> bool:
    """Whether this is a regular file owned by this process's user."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()


def open_unlinked(path: str, flags: int) -> int:
    """An `opener` for `open` that does not follow a link at `path`. Raises `OSError` (ELOOP) for one."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
