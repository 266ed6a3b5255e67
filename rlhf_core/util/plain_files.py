"""Safe access to files in untrusted folders: regular files only, without following links."""

from __future__ import annotations

import os
import stat
from pathlib import Path


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


def is_own(path: Path) -> bool:
    """Whether this is a regular file owned by this process's user."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()


def open_unlinked(path: str, flags: int) -> int:
    """An `opener` for `open` that does not follow a link at `path`. Raises `OSError` (ELOOP) for one."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
