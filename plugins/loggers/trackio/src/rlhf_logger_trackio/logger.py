"""Trackio: one Trackio run per run folder, which a resumed run continues."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from rlhf_core.components import HookContext

from .plugin import TrackioConfig


class TrackioLogger:
    """Logs to a Trackio run that is opened at the first update."""

    def __init__(self, config: TrackioConfig, context: HookContext) -> None:
        self._config = config
        self._context = context
        self._run: Any = None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._run is None:
            self._run = self._open()
        self._run.log(dict(values), step=step)

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
