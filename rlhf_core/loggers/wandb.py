"""Weights & Biases: every number of every line of `metrics.jsonl`, and the run file without its secrets."""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import UserInputError
from ..hookspecs import FitInfo, Metrics, hookimpl
from ..util.atomic import write_bytes
from ..util.redact import redact_mapping
from .scalars import scalars

_RUN_ID = "wandb-id"


class WandbLogger:
    """One W&B run per run folder; a resumed run continues it.

    Without an account or a network, set `WANDB_MODE=offline` (or `mode="offline"`) and upload later with
    `wandb sync`.
    """

    def __init__(
        self, *, project: str = "rlhf", name: str | None = None, mode: str | None = None, folder: Path | None = None
    ) -> None:
        """Raises UserInputError where the package `wandb` is not installed. `folder`: default the run folder."""
        if find_spec("wandb") is None:
            raise UserInputError(
                "wandb is not installed",
                where="logging.wandb",
                hint="pip install 'rlhf-core[wandb]', or set logging.wandb to false",
            )
        self._project = project
        self._name = name
        self._mode = mode
        self._folder = folder
        self._config: dict[str, Any] = {}
        self._run: Any = None

    @hookimpl
    def rlhf_run_start(self, run_folder: Path, config: Metrics) -> None:
        self._folder = self._folder or run_folder
        self._config = redact_mapping(config)

    @hookimpl
    def rlhf_fit_start(self, info: FitInfo) -> None:
        folder = self._folder or Path.cwd()
        folder.mkdir(parents=True, exist_ok=True)
        self._run = import_module("wandb").init(
            project=self._project,
            name=self._name or folder.name,
            dir=str(folder),
            config=self._config or {"algorithm": info.algorithm},
            mode=self._mode or os.environ.get("WANDB_MODE"),
            id=_read_id(folder),
            resume="allow",
        )
        write_bytes(folder / _RUN_ID, f"{self._run.id}\n".encode())

    @hookimpl
    def rlhf_metrics(self, line: Metrics) -> None:
        if self._run is not None:
            self._run.log(scalars(line), step=int(line["step"]))

    @hookimpl
    def rlhf_fit_end(self, error: BaseException | None) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish(exit_code=0 if error is None else 1)


def _read_id(folder: Path) -> str | None:
    path = folder / _RUN_ID
    return path.read_text(encoding="utf-8").strip() if path.exists() else None
