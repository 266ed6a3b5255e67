"""MLflow: one MLflow run per run folder, which a resumed run continues."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

from rlhf_core.components import HookContext
from rlhf_pages import SampleLogger, SampleTable

from .plugin import MlflowConfig

_RUN_ID = "mlflow-run-id"
_ARTIFACTS = "mlflow-artifacts"
"""Folder of the tables in the run folder, if the store is in the run folder, too."""
_TABLE = "samples.json"
_MAX_PARAMETER_CHARACTERS = 6000
_PARAMETERS_PER_CALL = 100


class MlflowLogger(SampleLogger):
    """Logs to an MLflow run that is opened at the first update.

    The samples of a run are one table, to which each logged episode adds its rows.
    """

    def __init__(self, config: MlflowConfig, context: HookContext) -> None:
        super().__init__(config, context.run_folder)
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

    def log_samples(self, step: int, table: SampleTable) -> None:
        if self._client is None:
            self._open()
        columns = zip(table.columns, zip(*table.rows, strict=True), strict=True)
        data = {"step": [step] * len(table.rows), **{name: list(values) for name, values in columns}}
        self._client.log_table(self._run_id, data, _TABLE)

    def finish(self, failed: bool) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.set_terminated(self._run_id, status="FAILED" if failed else "FINISHED")

    def _open(self) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param, RunStatus

        folder = self._context.run_folder
        store, artifacts = self._config.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI"), None
        if store is None:
            store = f"sqlite:///{(folder / 'mlflow.db').absolute()}"
            artifacts = (folder / _ARTIFACTS).absolute().as_uri()  # else a folder mlruns in the working folder
        self._client = MlflowClient(tracking_uri=store)
        id_file = folder / _RUN_ID
        if id_file.exists():
            self._run_id = id_file.read_text(encoding="utf-8").strip()
            self._client.update_run(self._run_id, status=RunStatus.to_string(RunStatus.RUNNING))
            return
        name = self._config.experiment
        known = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name, artifacts) if known is None else known.experiment_id
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
