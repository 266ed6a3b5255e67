"""Detects files of a run that are removed or replaced while it runs."""

from __future__ import annotations

from pathlib import Path

from ..errors import RlhfError
from .folder import RunFolder


class FileWatch:
    """Remembers the run folder's files at construction and detects when one is removed or replaced.

    If a user removes the folder and starts another run in it, the first run must not write into it.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        appended = (folder.lock, folder.metrics, folder.samples)
        replaced = (folder.config, folder.manifest)  # replaced by every change
        self._appended = {path: seen for path in appended if (seen := _identity(path)) is not None}
        self._replaced = [path for path in replaced if path.exists()]

    @property
    def has_folder(self) -> bool:
        """Whether the folder still belongs to this run."""
        lock = self._folder.lock
        return self._folder.path.is_dir() and self._appended.get(lock) in (None, _identity(lock))

    def check(self) -> None:
        """Raise `RlhfError`, naming them, where files were removed or replaced."""
        gone = [path for path, seen in self._appended.items() if _identity(path) != seen]
        gone += [path for path in self._replaced if not path.exists()]
        if gone:
            what = ", ".join(path.name for path in gone) if self.has_folder else "the run folder"
            raise RlhfError(
                f"{what} was removed or replaced by somebody while the run went on",
                where=str(self._folder.path),
                hint="start anew with another --output"
                if not self.has_folder
                else "put it back, then --resume auto; or start anew with another --output",
            )


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and inode of a file, None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
