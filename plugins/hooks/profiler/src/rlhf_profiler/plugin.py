"""The component, and its options."""

from __future__ import annotations

from pydantic import Field

from rlhf_core import Component
from rlhf_core.config import Section


class ProfilerConfig(Section):
    """Options of `hooks: {profiler: …}`."""

    episodes: list[int] = Field(
        default=[1], min_length=1, description="Episodes that are traced, counted from 0 as in metrics.jsonl."
    )
    memory: bool = Field(False, description="Trace allocations, too; on a GPU also write a snapshot of its memory.")
    shapes: bool = Field(False, description="Record the shapes of each operation's inputs.")
    stacks: bool = Field(False, description="Record Python's call stacks: larger traces.")
    folder: str = Field(
        "profile", min_length=1, description="Where traces go; a relative path starts at the run folder."
    )


profiler = Component(
    summary="Traces chosen episodes with torch's profiler; memory snapshots.",
    config=ProfilerConfig,
    build="rlhf_profiler.hook:Profiler",
)
