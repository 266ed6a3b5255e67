"""A run folder for each model, which `rlhf dashboard` and `rlhf report` show like that of a run."""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhf_core.errors import RlhfError
from rlhf_core.runfolder import RunFolder

from .checkpoints import folder_name

logger = logging.getLogger("rlhf.serve_training")


class RunFolders:
    """Writes config, metrics and status of models. Nothing reads them back, and a lost line is not written again."""

    def __init__(self, output: Path, strategy: str, max_ended: int) -> None:
        """Create the object.

        Args:
            output: the output folder.
            strategy: name of the strategy.
            max_ended: maximum number of folders of models that are unloaded. The oldest are deleted.
        """
        self._output, self._strategy, self._max_ended = output / "runs", strategy, max_ended
        self._passes: dict[str, tuple[float, float]] = {}

    def begin(self, model_id: str, about: Mapping[str, Any], tenant: str) -> None:
        """Create the folder of a model.

        Args:
            model_id: the model.
            about: its base model and its adapter.
            tenant: its tenant.
        """
        folder = self._folder(model_id)
        with _optional(folder):
            folder.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            folder.write_config(
                {
                    "model": {"path": about["base"], "lora": {"r": about["spec"]["rank"]}},
                    "algorithm": {"name": f"tinker ({tenant})"},
                    "strategy": {"name": self._strategy},
                }
            )
            self._write_status(folder, "running")

    def resume(self, model_id: str) -> None:
        """Note that this server has the model now."""
        folder = self._folder(model_id)
        with _optional(folder):
            if folder.path.exists():
                self._write_status(folder, "running")

    def forward(self, model_id: str, loss: float, seconds: float) -> None:
        """Add passes to those of the model's next step.

        Args:
            model_id: the model.
            loss: their loss.
            seconds: their duration.
        """
        losses, durations = self._passes.get(model_id, (0.0, 0.0))
        self._passes[model_id] = (losses + loss, durations + seconds)

    def step(self, model_id: str, step: int, grad_norm: float, seconds: float) -> None:
        """Write the line of a step.

        Args:
            model_id: the model.
            step: number of the step, from 1.
            grad_norm: norm of the gradients before clipping.
            seconds: duration of the step.
        """
        folder = self._folder(model_id)
        loss, passes = self._passes.pop(model_id, (0.0, 0.0))
        values = {"loss/policy": loss, "policy/grad_norm": grad_norm, "time/train_s": passes + seconds}
        with _optional(folder), folder.metrics.open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")

    def end(self, model_id: str) -> None:
        """Note that a model is unloaded."""
        self._passes.pop(model_id, None)
        folder = self._folder(model_id)
        with _optional(folder):
            if folder.path.exists():
                self._write_status(folder, "done")
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        """Delete the folders of models that were unloaded before `max_ended` others."""
        folders = [RunFolder(each) for each in self._output.iterdir()]
        ended = [each.path for each in folders if each.read_json(each.summary).get("status") == "done"]
        for each in sorted(ended, key=lambda folder: folder.stat().st_mtime)[: -self._max_ended]:
            shutil.rmtree(each, ignore_errors=True)

    def _folder(self, model_id: str) -> RunFolder:
        return RunFolder(self._output / folder_name(model_id))

    def _write_status(self, folder: RunFolder, status: str) -> None:
        facts = {"pid": os.getpid(), "host": socket.gethostname(), "started": time.time()}
        folder.write_summary({"status": status, **facts})


@contextmanager
def _optional(folder: RunFolder) -> Iterator[None]:
    """Context whose errors are logged only: a request does not fail because its curve cannot be written."""
    try:
        yield
    except (OSError, RlhfError) as error:
        logger.warning("%s cannot be written: %s", folder.path, error)
