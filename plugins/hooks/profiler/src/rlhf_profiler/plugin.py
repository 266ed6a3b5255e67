"""The component and its options."""

from __future__ import annotations

from pydantic import Field

from rlhf_core import Component
from rlhf_core.config import Section


class ProfilerConfig(Section):
    """Options of `hooks: {profiler: …}`."""

    episodes: list[int] = Field(
        default=[1], min_length=1, description="Episodes to trace, counted from 0 as in metrics.jsonl."
    )
    memory: bool = Field(False, description="Also trace allocations and, on a GPU, write a snapshot of its memory.")
    shapes: bool = Field(False, description="Record the shapes of each operation's inputs.")
    stacks: bool = Field(False, description="Record Python's call stacks, which makes traces larger.")
    folder: str = Field(
        "profile", min_length=1, description="Folder of the traces. A relative path starts at the run folder."
    )


profiler = Component(
    summary="Traces chosen episodes with torch's profiler, optionally with memory snapshots.",
    config=ProfilerConfig,
    build="rlhf_profiler.hook:Profiler",
)
