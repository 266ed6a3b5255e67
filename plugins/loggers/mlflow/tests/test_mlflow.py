"""MLflow: core's contract over a real store in a file, and what is said where the library is missing."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from pydantic import BaseModel

from rlhf_core import train
from rlhf_core.components import HookContext
from rlhf_core.errors import ConfigError
from rlhf_logger_mlflow.logger import MlflowLogger
from rlhf_logger_mlflow.plugin import MlflowConfig
from rlhf_testing.contracts import LoggerContract
from rlhf_testing.contracts.logger import Logged
from rlhf_testing.runs import tiny_run

pytestmark = pytest.mark.usefixtures("no_plots")
here = pytest.mark.skipif(find_spec("mlflow") is None, reason="mlflow is not installed here: make env-clients")
missing = pytest.mark.skipif(find_spec("mlflow") is not None, reason="mlflow is installed here")


def client(folder: Path):
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")


@here
@pytest.mark.filterwarnings("ignore")
class TestContract(LoggerContract):
    """A database in the run folder."""

    plugin = "mlflow"

    @classmethod
    def logged(cls, run_folder: Path, config: BaseModel) -> Logged:
        found, run_id = client(run_folder), (run_folder / "mlflow-run-id").read_text().strip()
        names = found.get_run(run_id).data.metrics
        return {
            name: {point.step: point.value for point in sorted(found.get_metric_history(run_id, name), key=_when)}
            for name in names
        }


def _when(point) -> int:
    return int(point.timestamp)


@here
@pytest.mark.filterwarnings("ignore")
def test_one_run_with_its_parameters_over_a_resume(tmp_path: Path) -> None:
    context = HookContext(run_folder=tmp_path, run={"train": {"episodes": 3}, "rewards": [{"name": "exact-match"}]})
    config = MlflowConfig(experiment="sorting", run_name="first")
    for step, failed in ((1, True), (2, False)):
        logger = MlflowLogger(config, context)
        logger.log(step, {"reward/mean": 0.5})
        logger.finish(failed)
    found = client(tmp_path)
    experiment = found.get_experiment_by_name("sorting")
    (run,) = found.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert run.data.params == {"train.episodes": "3", "rewards": '[{"name": "exact-match"}]'}


@here
@pytest.mark.filterwarnings("ignore")
def test_samples_of_a_run_are_one_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = {"samples": 3, "samples_every_episodes": 1}
    train(tiny_run({"train": {"episodes": 2}, "logging": {"mlflow": options}}), output=tmp_path / "run")
    found, run_id = client(tmp_path / "run"), (tmp_path / "run" / "mlflow-run-id").read_text().strip()
    assert '"samples.json", "type": "table"' in found.get_run(run_id).data.tags["mlflow.loggedArtifacts"]
    table = json.loads(Path(found.download_artifacts(run_id, "samples.json", str(tmp_path / "run"))).read_text())
    columns = ["step", "episode", "prompt", "completion", "reward", "reward/exact-match", "length"]
    assert table["columns"] == columns
    assert [row[1] for row in table["data"]] == [0, 0, 0, 1, 1, 1]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]  # nothing in the working folder


@missing
def test_selecting_it_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"logging\.mlflow: .*needs mlflow.*\n.*rlhf-logger-mlflow\[mlflow\]"):
        train(tiny_run({"logging": {"mlflow": True}}), output=tmp_path / "run")


@missing
def test_its_options_are_checked_without_it(tmp_path: Path) -> None:
    assert MlflowConfig.model_validate({"tracking_uri": "http://localhost:5000"}).experiment == "rlhf"
