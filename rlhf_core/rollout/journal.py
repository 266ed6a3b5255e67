"""Lines that a player stores in the run folder, independent of checkpoints."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..util.jsonl import LineFile, read_lines

logger = logging.getLogger(__name__)


class Journal:
    """An append-only journal of JSON objects, in a folder that the processes and attempts of a run share.

    Each journal writes its own file, so a crash loses at most the line being written.
    """

    def __init__(self, folder: Path | None) -> None:
        """Create a journal. `folder`: None for a process without access to the run folder, which stores nothing."""
        self.folder = folder
        """Folder of the journal's files. A player may delete files that it no longer needs."""
        self.path: Path | None = None
        """The file that `append` writes, or None before its first line."""
        self._file: LineFile | None = None

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line, unbuffered. Raises `ValueError` or `TypeError` for a value that JSON cannot represent."""
        if self._file is None:
            if self.folder is None:
                logger.warning("a player's journal stores nothing: the run folder is not on this machine")
                self.path = Path(os.devnull)
            else:
                self.folder.mkdir(parents=True, exist_ok=True)
                self.path = self.folder / f"{time.time_ns()}-{os.getpid()}.jsonl"
            self._file = LineFile(self.path)
        self._file.append([record])

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the lines of earlier attempts of the run, and of other processes so far."""
        for path in sorted(self.folder.glob("*.jsonl")) if self.folder is not None else ():
            if path != self.path:
                yield from read_lines(path)

    def close(self) -> None:
        """Close the file. Later lines are written to a new one."""
        if self._file is not None:
            self._file.close()
            self._file = None
