"""MLflow: one MLflow run per run folder, which a resumed run continues."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

from rlhf_core.components import HookContext

from .plugin import MlflowConfig

_RUN_ID = "mlflow-run-id"
_MAX_PARAMETER_CHARACTERS = 6000
_PARAMETERS_PER_CALL = 100


class MlflowLogger:
    """Logs to an MLflow run that is opened at the first update."""

    def __init__(self, config: MlflowConfig, context: HookContext) -> None:
        self._config = config
        self._context = context
        self._client: Any = None
        self._run_id = ""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._client is None:
            self._open()
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def finish(self, failed: bool) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.set_terminated(self._run_id, status="FAILED" if failed else "FINISHED")

    def _open(self) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param, RunStatus

        folder = self._context.run_folder
        store = (
            self._config.tracking_uri
            or os.environ.get("MLFLOW_TRACKING_URI")
            or f"sqlite:///{(folder / 'mlflow.db').absolute()}"
        )
        self._client = MlflowClient(tracking_uri=store)
        id_file = folder / _RUN_ID
        if id_file.exists():
            self._run_id = id_file.read_text(encoding="utf-8").strip()
            self._client.update_run(self._run_id, status=RunStatus.to_string(RunStatus.RUNNING))
            return
        known = self._client.get_experiment_by_name(self._config.experiment)
        experiment = self._client.create_experiment(self._config.experiment) if known is None else known.experiment_id
        run = self._client.create_run(experiment, run_name=self._config.run_name or folder.name)
        self._run_id = run.info.run_id
        parameters = [Param(key, text[:_MAX_PARAMETER_CHARACTERS]) for key, text in _flatten(self._context.run)]
        for start in range(0, len(parameters), _PARAMETERS_PER_CALL):
            self._client.log_batch(self._run_id, params=parameters[start : start + _PARAMETERS_PER_CALL])
        id_file.write_text(f"{self._run_id}\n", encoding="utf-8")


def _flatten(run: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield dotted keys and values of a run file as text. Lists are not split.

    Example:
        >>> list(_flatten({"train": {"seed": 1}, "rewards": ["length"]}))
        [('train.seed', '1'), ('rewards', '["length"]')]
    """
    for key, value in run.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)
