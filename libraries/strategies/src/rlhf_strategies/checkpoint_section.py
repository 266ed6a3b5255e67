"""The section `checkpoint.background` of a run file. Imports only pydantic and core."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from rlhf_core.components import Component
from rlhf_core.config import Section

if TYPE_CHECKING:
    from rlhf_core.runfolder import CheckpointStore


class BackgroundConfig(Section):
    """`checkpoint.background` section: a thread writes checkpoints while training continues."""

    timeout_seconds: float = Field(
        default=1800.0,
        gt=0,
        le=86400,
        description="Maximum wait for the previous checkpoint, before the next one and at the end of the run.",
    )

    def checkpoint_store(self, store: CheckpointStore) -> CheckpointStore:
        from .background import BackgroundStore

        return BackgroundStore(store, timeout_seconds=self.timeout_seconds)


background = Component(
    summary="Writes checkpoints in a thread while training continues, from a copy in host memory",
    config=BackgroundConfig,
)
