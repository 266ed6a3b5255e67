"""Writers of `metrics.jsonl` and `samples.jsonl`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, RlhfError
from ..util.jsonl import LineFile, truncate_lines


class RunLines(LineFile):
    """A file of lines that a run appends to. Raises `RlhfError` with a hint if a line cannot be written."""

    def __init__(self, path: Path, key: str, last: int, *, instead: str, count: int | None = None) -> None:
        """Open the file and cut lines whose number under `key` is above `last`, which the resumed checkpoint lacks.

        instead: end of a hint, what to do without this file. count: remaining lines according to the checkpoint.

        Raises:
            CheckpointError: there are fewer or more lines.
            DataError: a line is damaged. Names the line.
        """
        self._path = path
        self._instead = instead
        self.num_lines = truncate_lines(path, key, last)
        if count is not None and count != self.num_lines:
            raise CheckpointError(
                f"contains {self.num_lines} lines up to the checkpoint, which counts {count}",
                where=str(path),
                hint=f"restore the missing lines, or {instead}",
            )
        super().__init__(path)

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        with self._name_file_in_errors():
            super().append(records)
        self.num_lines += len(records)

    def sync(self) -> None:
        with self._name_file_in_errors():
            super().sync()

    @contextmanager
    def _name_file_in_errors(self) -> Iterator[None]:
        """Turn any error of the block into an `RlhfError` that names the file."""
        try:
            yield
        except Exception as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            message = f"{self._path.stem} cannot be written: {reason}"
            hint = f"free some space and start again with --resume auto, or {self._instead}"
            raise RlhfError(message, where=str(self._path), hint=hint) from error
