"""`metrics.jsonl` and `samples.jsonl` as they are written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, RlhfError
from ..util.jsonl import LineFile, truncate_lines


class RunLines(LineFile):
    """A file of lines that a run appends to. Raises `RlhfError`, which says what to do, where one cannot be written."""

    def __init__(self, path: Path, key: str, last: int, *, instead: str, count: int | None = None) -> None:
        """Lines whose number under `key` is above `last` are cut, as those behind the checkpoint of a resume.

        instead: for hints, what the user can do without this file. count: the lines there are then, by the checkpoint.

        Raises:
            CheckpointError: there are fewer or more.
            DataError: one of them is torn; names the line.
        """
        self._path = path
        self._instead = instead
        self.num_lines = truncate_lines(path, key, last)
        if count is not None and count != self.num_lines:
            raise CheckpointError(
                f"holds {self.num_lines} lines up to the checkpoint, which counts {count}",
                where=str(path),
                hint=f"put the missing lines back, or {instead}",
            )
        super().__init__(path)

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        with self._errors_named():
            super().append(records)
        self.num_lines += len(records)

    def sync(self) -> None:
        with self._errors_named():
            super().sync()

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            what = f"{self._path.stem} cannot be written: {reason}"
            hint = f"free some space and start again with --resume auto, or {self._instead}"
            raise RlhfError(what, where=str(self._path), hint=hint) from error
