"""`metrics.jsonl` and `samples.jsonl` as they are written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, RlhfError
from ..util.jsonl import LineFile, dump_line, truncate_lines


class RunLines:
    """A file of lines that a run appends to. Use as a context manager, or call `close`."""

    def __init__(self, path: Path, key: str, last: int, *, instead: str, count: int | None = None) -> None:
        """Lines whose number under `key` is above `last` are cut, as those behind the checkpoint of a resume.

        instead: for hints, what the user can do without this file. count: the lines there are then, by the checkpoint.

        Raises:
            CheckpointError: there are fewer or more.
            DataError: one of them is torn; names the line.
        """
        truncate_lines(path, key, last)
        self._path = path
        self._instead = instead
        self._file = LineFile(path)
        with path.open("rb") as file:
            self.num_lines = sum(1 for _ in file)
        if count is not None and count != self.num_lines:
            self.close()
            raise CheckpointError(
                f"holds {self.num_lines} lines up to the checkpoint, which counts {count}",
                where=str(path),
                hint=f"put the missing lines back, or {instead}",
            )

    def append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Write all lines, or none if the disk is full. Raises `RlhfError`."""
        with self._errors_named():
            self._file.append(b"".join(dump_line(line) for line in lines))
        self.num_lines += len(lines)

    def sync(self) -> None:
        """Wait until everything written is on disk, as before a checkpoint. Raises `RlhfError`."""
        with self._errors_named():
            self._file.sync()

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        self._file.close()

    def __enter__(self) -> RunLines:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            what = f"{self._path.stem} cannot be written: {reason}"
            hint = f"free some space and start again with --resume auto, or {self._instead}"
            raise RlhfError(what, where=str(self._path), hint=hint) from error
