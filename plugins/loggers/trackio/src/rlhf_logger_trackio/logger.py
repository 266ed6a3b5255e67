"""Trackio: one Trackio run per run folder, which a resumed run continues."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from rlhf_core.components import HookContext
from rlhf_pages import SampleLogger, SampleTable

from .plugin import TrackioConfig


class TrackioLogger(SampleLogger):
    """Logs to a Trackio run that is opened at the first update, with a table of samples per logged episode."""

    def __init__(self, config: TrackioConfig, context: HookContext) -> None:
        super().__init__(config, context.run_folder)
        self._config = config
        self._context = context
        self._run: Any = None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._run is None:
            self._run = self._open()
        self._run.log(dict(values), step=step)

    def log_samples(self, step: int, table: SampleTable) -> None:
        if self._run is None:
            self._run = self._open()
        rows = [list(row) for row in table.rows]
        self._run.log({"samples": import_module("trackio").Table(list(table.columns), rows)}, step=step)

    def finish(self, failed: bool) -> None:
        if self._run is not None:
            self._run = None
            with contextlib.redirect_stdout(io.StringIO()):  # hides its hints among the run's own output
                import_module("trackio").finish()

    def _open(self) -> Any:
        with contextlib.redirect_stdout(io.StringIO()):
            return import_module("trackio").init(
                project=self._config.project,
                name=self._config.run_name or self._context.run_folder.name,
                space_id=self._config.space_id,
                config=dict(self._context.run),
                resume="allow",
                embed=False,
            )
