"""The component and its options."""

from __future__ import annotations

from pydantic import Field

from rlhf_core import Component
from rlhf_pages import SampleTableOptions


class TrackioConfig(SampleTableOptions):
    """Options of `logging: {trackio: …}`."""

    project: str = Field("rlhf", min_length=1, description="Project that the run belongs to.")
    run_name: str | None = Field(None, min_length=1, description="Name of the run. null uses the run folder's name.")
    space_id: str | None = Field(
        None, min_length=1, description="Space on the Hugging Face hub to send the metrics to. null sends nothing."
    )


trackio = Component(
    summary="A run of a Trackio project, on this machine.",
    config=TrackioConfig,
    build="rlhf_logger_trackio.logger:TrackioLogger",
    requires=("trackio",),
    install="pip install 'rlhf-logger-trackio[trackio]'",
)
