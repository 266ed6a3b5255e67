"""Replaces files atomically, and opens them safely in folders that others may write to."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the folder of `path`. It is synced and renamed to `path`, or removed on error."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)  # remains of a killed process, or a link, which would be followed
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file atomically by one with `content`."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def type_problem(path: Path, *, is_folder: bool = False) -> str | None:
    """Return why `path` is not a regular file (or folder), or None if it is one or is missing."""
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
    """Whether `path` is a regular file, not a link, owned by this process's user.

    Args:
        path: may be missing.
    """
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def open_no_follow(path: str, flags: int) -> int:
    """Opener for `open` that does not follow a link at `path`, but raises `OSError` (ELOOP)."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
