"""Weights & Biases: one W&B run per run folder, which a resumed run continues."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from rlhf_core.components import HookContext
from rlhf_pages import SampleLogger, SampleTable

from .config import WandbConfig

_RUN_ID = "wandb-id"


class WandbLogger(SampleLogger):
    """Logs to a W&B run that is opened at the first update.

    The samples of a session are one table, to which each logged episode adds its rows.
    """

    def __init__(self, config: WandbConfig, context: HookContext) -> None:
        super().__init__(config, context.run_folder)
        self._config = config
        self._context = context
        self._run: Any = None
        self._table: Any = None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._run is None:
            self._run = self._open()
        self._run.log(dict(values), step=step)

    def log_samples(self, step: int, table: SampleTable) -> None:
        if self._run is None:
            self._run = self._open()
        columns = list(table.columns)
        if self._table is None or self._table.columns != columns:
            self._table = import_module("wandb").Table(columns=columns, log_mode="INCREMENTAL")
        for row in table.rows:
            self._table.add_data(*row)
        self._run.log({"samples": self._table}, step=step)

    def finish(self, failed: bool) -> None:
        run, self._run, self._table = self._run, None, None
        if run is not None:
            run.finish(exit_code=int(failed))

    def _open(self) -> Any:
        folder = self._context.run_folder
        folder.mkdir(parents=True, exist_ok=True)
        id_file = folder / _RUN_ID
        run = import_module("wandb").init(
            project=self._config.project,
            name=self._config.run_name or folder.name,
            dir=str(folder),
            config=dict(self._context.run),
            mode=self._config.mode or os.environ.get("WANDB_MODE"),
            id=id_file.read_text(encoding="utf-8").strip() if id_file.exists() else None,
            resume="allow",
        )
        id_file.write_text(f"{run.id}\n", encoding="utf-8")
        return run
