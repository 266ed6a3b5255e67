"""Files of a folder that may not be one's own: regular ones only, and no link is followed out of it."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def oddity(path: Path, *, is_folder: bool = False) -> str | None:
    """What stands in the place of a regular file (or folder), in words; None where one does, or nothing."""
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
    """Whether this is a regular file that belongs to this process's user."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()


def open_unlinked(path: str, flags: int) -> int:
    """An `opener` for `open` that follows no link at the end of `path`. Raises OSError (ELOOP) at one."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
