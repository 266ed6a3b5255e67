"""CSV: one table with a row an update and a column a metric; a metric without a value leaves its cell empty."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from rlhf_core.components import HookContext

from .config import CsvConfig

_STEP = "step"


class CsvLogger:
    """Appends to the table; it is written anew where a metric is new, or an update comes again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._columns: list[str] = []
        self._last_step = 0
        self._is_open = False

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if not self._is_open:
            self._open()
        new = [name for name in values if name not in self._columns]
        if new or step <= self._last_step:
            earlier = [row for row in self._rows() if int(row[_STEP]) < step]
            self._columns += new
            self._write("w", earlier)
        self._write("a", [{_STEP: step, **values}])
        self._last_step = step

    def finish(self, failed: bool) -> None:
        self._is_open = False

    def _open(self) -> None:
        """Find what an earlier session wrote."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        rows = self._rows()
        self._columns = list(rows[0]) if rows else [_STEP]
        self._last_step = int(rows[-1][_STEP]) if rows else 0
        self._is_open = True

    def _rows(self) -> list[dict[str, str]]:
        if not self._path.exists():
            return []
        with self._path.open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))

    def _write(self, mode: Literal["w", "a"], rows: Sequence[Mapping[str, object]]) -> None:
        with self._path.open(mode, encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, self._columns, restval="")
            if mode == "w":
                writer.writeheader()
            writer.writerows(rows)


def build(config: CsvConfig, context: HookContext) -> CsvLogger:
    """The logger of `logging: {csv: …}`."""
    return CsvLogger(context.run_folder / config.path)
