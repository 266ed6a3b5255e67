"""Options of the loggers `tensorboard` and `wandb`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlhf_core.config import Section
from rlhf_pages import SampleTableOptions


class TensorBoardConfig(Section):
    """Options of `logging: {tensorboard: …}`."""

    folder: str = Field(
        "tensorboard", min_length=1, description="Folder of the event files. A relative path starts at the run folder."
    )


class WandbConfig(SampleTableOptions):
    """Options of `logging: {wandb: …}`."""

    project: str = Field("rlhf", min_length=1, description="Project that the run belongs to.")
    run_name: str | None = Field(None, min_length=1, description="Name of the run. null uses the run folder's name.")
    mode: Literal["online", "offline", "disabled"] | None = Field(
        None, description="offline writes into the run folder, for `wandb sync`. null uses WANDB_MODE."
    )
