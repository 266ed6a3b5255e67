"""The component and its options."""

from __future__ import annotations

from pydantic import Field

from rlhf_core import Component
from rlhf_pages import SampleTableOptions


class MlflowConfig(SampleTableOptions):
    """Options of `logging: {mlflow: …}`."""

    tracking_uri: str | None = Field(
        None,
        min_length=1,
        description="Server or store, such as http://localhost:5000 or sqlite:///mlflow.db. null uses "
        "MLFLOW_TRACKING_URI, or mlflow.db in the run folder.",
    )
    experiment: str = Field("rlhf", min_length=1, description="Experiment that the run belongs to.")
    run_name: str | None = Field(None, min_length=1, description="Name of the run. null uses the run folder's name.")


mlflow = Component(
    summary="A run of an MLflow experiment.",
    config=MlflowConfig,
    build="rlhf_logger_mlflow.logger:MlflowLogger",
    requires=("mlflow",),
    install="pip install 'rlhf-logger-mlflow[mlflow]'",
)
